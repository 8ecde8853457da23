"""Parts of a chain: what --from, --until and --only leave to run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.chain.plan import Plan, plan_file
from pipeline.chain.registry import Registry
from pipeline.contracts.export import ExportedModel
from pipeline.errors import UsageError
from pipeline.execution.journal import Journal
from pipeline.execution.resume import Selection, digests, ends_early, plan_resume, preview_lines

RECIPE = """\
name: parts
launch: {procs: 1, device: cpu}
stages:
  model: {use: model.hf, config: {model_type: llama}}
  precision: {use: precision.policy, compute: fp32}
  data: {use: data.text, files: ./text.txt, sequence_length: 8}
  optimizer: {use: optimizer.adamw, lr: 0.1}
  wrap: {use: wrap.ddp}
  checkpoint: {use: checkpoint.sharded}
  train: {use: train.causal_lm, steps: 2, global_batch_size: 2}
  consolidate: {use: consolidate.stream}
  export: {use: export.safetensors}
"""
ORDER = ["model", "precision", "data", "optimizer", "wrap", "checkpoint", "train", "consolidate",
         "export"]  # fmt: skip


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return plan_file(tmp_path / "recipe.yaml", registry=Registry.installed(), forecast=True)


def finished(folder: Path, plan: Plan, slots: Iterable[str]) -> Journal:
    """Return a journal in which these slots have finished; training and export left something."""
    journal = Journal(folder / "journal.jsonl")
    found = digests(plan)
    folder.joinpath("weights").touch()
    records = {
        "train": {"checkpoint": str(folder), "progress": {}},
        "export": {"folder": str(folder), "files": ["weights"], "total_bytes": 0},
    }
    for slot in slots:
        journal.write("slot started", slot=slot)
        journal.write("slot finished", slot=slot, digest=found[slot], record=records.get(slot))
    return journal


def left(plan: Plan, journal: Journal, selection: Selection) -> set[str]:
    """Return the slots that a start under the selection would run."""
    selection.set_aside(plan, journal)
    return set(plan_resume(selection.cut(plan), journal, thorough=False).run)


def test_until_a_slot_and_then_the_rest(tmp_path: Path, plan: Plan) -> None:
    assert left(plan, finished(tmp_path, plan, []), Selection(last="train")) == set(ORDER[:7])
    assert ends_early(Selection(last="train").cut(plan)) == "train"
    journal = finished(tmp_path, plan, ORDER[:7])
    assert left(plan, journal, Selection(last="train")) == set()
    assert left(plan, journal, Selection()) == {"model", "consolidate", "export"}
    assert ends_early(plan) is None


def test_one_slot_again(tmp_path: Path, plan: Plan) -> None:
    journal = finished(tmp_path, plan, ORDER)
    assert left(plan, journal, Selection()) == set()
    assert left(plan, journal, Selection(only="export")) == {"model", "consolidate", "export"}
    finished(tmp_path, plan, ["export"])
    assert left(plan, journal, Selection(only="train")) == set(ORDER[:7])


def test_a_slot_and_all_behind_it(tmp_path: Path, plan: Plan) -> None:
    journal = finished(tmp_path, plan, ORDER)
    assert left(plan, journal, Selection(first="train")) == set(ORDER)
    journal = finished(tmp_path, plan, ORDER)
    assert left(plan, journal, Selection(first="train", last="train")) == set(ORDER[:7])


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"last": "trian"}, "did you mean `train`"),
        ({"first": "nothing"}, "no slot `nothing`"),
        ({"first": "export", "last": "train"}, "--from export comes after --until train"),
        ({"only": "train", "last": "train"}, "--only excludes"),
    ],
)
def test_mistakes(chosen: dict[str, str], message: str, tmp_path: Path, plan: Plan) -> None:
    journal = finished(tmp_path, plan, ORDER)
    before = journal.path.read_bytes()
    with pytest.raises(UsageError, match=message):
        Selection(**chosen).set_aside(plan, journal)
    assert journal.path.read_bytes() == before


def test_a_rehearsal_changes_nothing(tmp_path: Path, plan: Plan) -> None:
    journal = finished(tmp_path, plan, ORDER[:7])
    before = journal.path.read_bytes()
    lines = list(preview_lines(plan, tmp_path, Selection(first="train", last="consolidate")))
    assert lines[0] == "parts: 1 process, cpu"
    found = {line.split()[0]: " ".join(line.split()[2:]) for line in lines[1:-1]}
    expected = dict.fromkeys(ORDER[:8], "would run") | {"export": "is left out"}
    assert found == expected
    assert journal.path.read_bytes() == before


def test_all_results_are_looked_at_before_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading an export takes many minutes."""
    (tmp_path / "text.txt").write_text("some text")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"{RECIPE}  second: {{use: export.safetensors, folder: {tmp_path}/2}}\n")
    plan = plan_file(recipe, registry=Registry.installed(), forecast=True)
    journal, did = finished(tmp_path, plan, [*ORDER, "second"]), list[str]()
    restore, export = ExportedModel.restore, type(plan.slots[-1].stage)

    def looked(record: Mapping[str, Any]) -> ExportedModel:
        did.append("looked")
        return restore(record)

    monkeypatch.setattr(ExportedModel, "restore", looked)
    monkeypatch.setattr(export, "verify_result", lambda *_: did.append("read"))
    journal.write(
        "slot finished", slot="second", digest=digests(plan)["second"],
        record={"folder": str(tmp_path), "files": ["weights"], "total_bytes": 0},
    )  # fmt: skip
    assert not plan_resume(plan, journal).run
    assert did == ["looked", "looked", "looked", "read", "looked", "read"]
    did.clear()
    (tmp_path / "weights").unlink()
    assert {"export", "second"} < plan_resume(plan, journal).run
    assert did == ["looked", "looked"]

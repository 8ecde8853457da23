"""An entire tiny run: its lines, its metrics and its events are what the documents say, under every
strategy."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from pipeline.contracts.metrics import OWN, kind_of, records
from tests.pipeline.conftest import TinyRun
from tests.support.pipe import Pipe
from tests.support.tier import spread
from tests.support.tiny_project import CHAIN, tiny_project

PAGE = (Path(__file__).parents[3] / "docs/running.md").read_text("utf-8")
EVENTS = PAGE.partition("\n## Events\n")[2]
LINES = """\
run folder: runs/tiny
track: track.sqlite
model: model.hf
precision: precision.policy
data: data.text
optimizer: optimizer.adamw
wrap: wrap.ddp
checkpoint: checkpoint.sharded
train: train.causal_lm
step 1/8  loss N  grad_norm N  lr N  N tokens/s  N s/step  eta N
step 2/8  loss N  grad_norm N  lr N  N tokens/s  N s/step  eta N
step 4/8  loss N  grad_norm N  lr N  N tokens/s  N s/step  eta N
step 4  eval_loss N  perplexity N  (the best so far)
step 4  A stage -> TEXT
step 4  a recipe -> TEXT
step 6/8  loss N  grad_norm N  lr N  N tokens/s  N s/step  eta N
step 8/8  loss N  grad_norm N  lr N  N tokens/s  N s/step  eta N
step 8  eval_loss N  perplexity N  (the best so far)
step 8  A stage -> TEXT
step 8  a recipe -> TEXT
consolidate: consolidate.stream
export: export.safetensors
"""
STEP = {
    "step": int, "grad_norm": float, "lr": float, "tokens": int, "samples": int, "applied": bool,
    "loss_scale": float, "time": float, "step_seconds": float, "target_tokens_per_second": float,
    "samples_per_second": float, "loss": float, "tokens_per_second": float,
    "tokens_per_second_per_rank": float, "data_wait_share": float, "peak_host_memory_bytes": int,
    "total_steps": int,
}  # fmt: skip
BEST = {"best_step": int, "best_eval_loss": float}
EVALUATION = {"step": int, "eval_loss": float, "perplexity": float, "time": float, **BEST}
GENERATED = {"step": int, "time": float, "generated": list}
CHECKPOINT = {"step": int, "time": float, "checkpoint_stall_seconds": float}
WRITTEN = {
    "step": int, "time": float, "checkpoint_seconds": float, "checkpoint_bytes": int,
    "checkpoint_user_seconds": float, "checkpoint_system_seconds": float,
    "checkpoint_slowed_seconds": float,
}  # fmt: skip
RECORDS = [
    *[STEP] * 4, EVALUATION, GENERATED, CHECKPOINT,
    *[STEP | BEST] * 4, EVALUATION, GENERATED, CHECKPOINT,
]  # fmt: skip
"""In order, without those of checkpoints on disk, which come when that is noticed."""


def types(record: dict[str, Any]) -> dict[str, type]:
    return {name: type(value) for name, value in record.items()}


def in_order(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records whose place does not depend on how fast a disk is."""
    return [record for record in found if kind_of(record) != "checkpoint written"]


def plain(said: str) -> str:
    """Return lines with what varies replaced, without those that depend on the machine."""
    text = re.sub(r"(-> ).*", r"\1TEXT", said)
    text = re.sub(r"\b(loss|grad_norm|lr|eval_loss|perplexity|eta) \S+", r"\1 N", text)
    return re.sub(r"  [\d.]+ (tokens/s|s/step)", r"  N \1", text)


def test_lines(tiny_run: TinyRun) -> None:
    lines = [line.rstrip() for line in plain(tiny_run.outcome.stderr).splitlines()]
    wanted = LINES.splitlines()
    assert [line for line in lines if line in wanted] == wanted
    rest = [line for line in lines if line not in wanted]
    folder = re.escape(str(tiny_run.folder.resolve()))
    project = re.escape(str(tiny_run.pipe.folder))
    forms = (
        rf"{project}/text.txt: 1 document, 4,081 tokens, [\d.]+ s",
        r"running: \{.*\}",
        rf"saved {folder}/checkpoints/step-0000000[48]  [\d.]+ MB  [\d.]+ s",
        rf"writing [\d.]+ KB in 1 file to {folder}/export",
        r"weights written: this process [\d.]+ KB in [\d.]+ s \(.*/s\)",
        r"the export loads and computes the same \(largest difference 0\)",
        r"finished in \d+:\d\d",
        r"  steps +8, [\d,]+ tokens/s \(mean\)",
        r"  held-out loss +\d\.\d{4} \(step 4\) -> TEXT",
        r"  run folder +runs/tiny",
        r"  checkpoint +runs/tiny/checkpoints/step-00000008",
        r"  (export|report) +runs/tiny/(export|report\.html)",
        r"  talk to it +pipe chat runs/tiny",
    )
    assert [line for line in rest if not any(re.fullmatch(form, line) for form in forms)] == []


def test_metrics(tiny_run: TinyRun) -> None:
    found = tiny_run.records
    assert {name for record in found for name in record} <= OWN
    kinds = [kind_of(record) for record in found]
    written = [record for record in found if kind_of(record) == "checkpoint written"]
    assert [list(types(record).items()) for record in (*in_order(found), *written)] == [
        list(expected.items()) for expected in (*RECORDS, WRITTEN, WRITTEN)
    ]
    assert [record["step"] for record in written] == [4, 8]
    assert kinds.index("checkpoint") < kinds.index("checkpoint written")
    assert kinds[-1] == "checkpoint written"
    assert [r["step"] for r in found if kind_of(r) == "step"] == list(range(1, 9))
    for record in found:
        for text in record.get("generated", ()):
            assert list(types(text).items()) == [("number", int), ("prompt", str), ("text", str)]
    texts = [r["generated"] for r in found if "generated" in r]
    assert [[text["prompt"] for text in one] for one in texts] == [["A stage", "a recipe"]] * 2
    assert all(len(text["text"]) == 4 for one in texts for text in one)  # a token is a byte


@pytest.mark.parametrize(
    "overrides",
    spread(
        [
            ["wrap.use=wrap.fsdp"],
            ["wrap.use=wrap.zero", "wrap.stage=2"],
            ["wrap.use=wrap.zero", "wrap.stage=3"],
            ["wrap.use=wrap.fsdp", "wrap.tensor_parallel.size=2"],
        ],
        keep=1,
    ),
)
def test_metrics_are_the_same_under_every_strategy(
    overrides: list[str], tiny_run: TinyRun, tmp_path: Path
) -> None:
    tiny_project(tmp_path)
    done = Pipe(tmp_path, tmp_path)("run", "tiny.yaml", *overrides, "--until", "train",
                                    "--run-dir", "run")  # fmt: skip
    assert done.code == 0, done.stderr
    found = list(records(tmp_path / "run/metrics.jsonl"))
    assert [types(record) for record in in_order(found)] == [
        types(record) for record in in_order(tiny_run.records)
    ]
    losses = [r["loss"] for r in tiny_run.records if "loss" in r]
    assert [r["loss"] for r in found if "loss" in r] == pytest.approx(losses, rel=1e-5)
    texts, expected = ([r["generated"] for r in rs if "generated" in r] for rs in (
        found, tiny_run.records))  # fmt: skip
    assert texts == expected


def documented() -> dict[str, set[str]]:
    """Return kind of event -> its fields, from the table of docs/running.md."""
    found: dict[str, set[str]] = {}
    for kinds, fields in re.findall(r"^\| (`.*`) \| (.*) \|$", EVENTS, flags=re.MULTILINE):
        for kind in re.findall(r"`([^`]+)`", kinds):
            found[kind] = set(re.findall(r"`(\w+)`", fields))
    return found


def test_events(tiny_run: TinyRun) -> None:
    events = tiny_run.events
    said = documented()
    version = re.search(r"`schema_version` \| (\d+)\.", EVENTS)
    assert version is not None
    assert {event["event"] for event in events} - said.keys() == set()
    for event in events:
        assert list(event)[:3] == ["schema_version", "time", "event"]
        assert event["schema_version"] == int(version[1])
        assert isinstance(event["time"], float)
    slots = ["track", *CHAIN]
    kinds = [event["event"] for event in events if event["event"] != "activity"]
    assert kinds[:2] == ["run", "run started"]
    assert kinds[-1] == "run finished"
    assert kinds.count("slot started") == kinds.count("slot finished") == len(slots)
    assert list(events[0]["slots"].items())[1:] == [(s, f["use"]) for s, f in CHAIN.items()]
    assert events[0]["folder"] == str(tiny_run.folder.resolve())
    for kind in ("run started", "slot started", "slot finished", "activity"):
        present = [event for event in events if event["event"] == kind]
        later = {"seconds", "record"} if kind == "slot started" else {"restart", "changed"}
        needed = said[kind] - later
        assert all(needed <= event.keys() for event in present), kind
    metrics = [event for event in events if event["event"] in set(map(kind_of, tiny_run.records))]
    times = ("schema_version", "event", "time")
    assert [{k: v for k, v in event.items() if k not in times} for event in metrics] == [
        {k: v for k, v in record.items() if k != "time"}
        for record in sorted(tiny_run.records, key=lambda record: record["time"])
    ]


def test_a_training_ends_behind_its_steps(tiny_run: TinyRun) -> None:
    order = [(e["event"], e.get("slot") or e.get("step")) for e in tiny_run.events]
    end = order.index(("slot finished", "train"))
    assert max(at for at, (kind, _) in enumerate(order) if kind == "step") < end
    assert order.index(("slot started", "train")) < order.index(("step", 1))


def test_the_report_has_the_texts_and_the_numbers(tiny_run: TinyRun) -> None:
    page = (tiny_run.folder / "report.html").read_text("utf-8")
    assert page.count('<div class="sample">') == 2
    assert page.count('<span class="label">step 8</span>') == 2
    for text in ("A stage", "a recipe", "8 of 8", "optimizer.adamw", "DistributedDataParallel"):
        assert text in page
    first, last = [r["eval_loss"] for r in tiny_run.records if "eval_loss" in r]
    assert f"<b>{last:.4f}</b><small>{first:.4f} at step 4</small>" in page


def test_a_tracker_has_everything(tiny_run: TinyRun) -> None:
    found = sqlite3.connect(tiny_run.pipe.folder / "runs.sqlite")
    rows = dict(found.execute("select step, value from metrics where name = 'loss'").fetchall())
    assert rows == {r["step"]: r["loss"] for r in tiny_run.records if "loss" in r}
    assert found.execute("select outcome from runs").fetchall() == [("finished",)]
    assert found.execute("select count(*) from texts").fetchone() == (4,)
    found.close()

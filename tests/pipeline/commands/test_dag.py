"""`pipe dag`: the chain as text, as Mermaid and as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.cli import main
from tests.support.tiny_project import CHAIN, tiny_project


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_project(tmp_path_factory.mktemp("project"))


def dag(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["dag", *map(str, arguments)])


READS = {
    "data": ["model"],
    "wrap": ["model", "precision", "optimizer"],
    "checkpoint": ["wrap", "model"],
    "train": ["wrap", "data", "optimizer", "checkpoint", "model"],
    "consolidate": ["train"],
    "export": ["consolidate", "model", "train"],
}


def test_text(recipe: Path) -> None:
    shown = dag(recipe)
    assert shown.exit_code == 0
    head, *rows = shown.stdout.splitlines()
    assert head.split() == ["slot", "stage", "reads", "returns"]
    cells = [re.split(r"  +", row) for row in rows]
    assert [row[:2] for row in cells] == [[slot, f["use"]] for slot, f in CHAIN.items()]
    assert {row[0]: row[2].split(", ") for row in cells if len(row) == 4} == READS
    assert [row[-1] for row in cells][4:7] == ["Engine", "Checkpoints", "TrainedRun"]


def test_mermaid(recipe: Path) -> None:
    shown = dag(recipe, "--mermaid")
    head, *lines = shown.stdout.splitlines()
    assert head == "flowchart LR"
    found = [
        re.fullmatch(r"  slot_(\w+)\[\"\1<br><small>(\S+)</small>\"\]", line) for line in lines
    ]
    nodes = {match[1]: match[2] for match in found if match}
    assert nodes == {slot: fields["use"] for slot, fields in CHAIN.items()}
    edges = [
        re.fullmatch(r"  slot_(\w+) -- (\w+) --> slot_(\w+)", line) for line in lines[len(nodes) :]
    ]
    drawn = {(edge[1], edge[3]) for edge in edges if edge}
    assert drawn == {(read, slot) for slot, read_by in READS.items() for read in read_by}
    assert "  slot_wrap -- Engine --> slot_train" in lines


def test_json(recipe: Path) -> None:
    found = json.loads(dag(recipe, "--json").stdout)
    assert (found["schema_version"], found["name"]) == (1, "tiny")
    assert [slot["slot"] for slot in found["slots"]] == list(CHAIN)
    by_name = {slot["slot"]: slot for slot in found["slots"]}
    assert by_name["train"]["inputs"] == {
        "engine": "wrap", "data": "data", "optimizer": "optimizer", "checkpoints": "checkpoint",
        "model": "model", "callback": None,
    }  # fmt: skip
    assert by_name["wrap"]["returns"] == "Engine"


def test_two_engines(recipe: Path) -> None:
    """The first is only read where `takes` names it."""
    text = recipe.read_text()
    first = "  reference: {use: wrap.fsdp}\n"
    two = recipe.with_name("two.yaml")
    two.write_text(text.replace("  wrap:\n", f"{first}  wrap:\n"))
    refused = dag(two)
    assert "no slot reads its result: slot `wrap` (wrap.ddp, " in refused.stderr
    named = ("train.takes.engine=reference", "checkpoint.takes={engine: reference}", "wrap=null")
    rows = [re.split(r"  +", row) for row in dag(two, *named).stdout.splitlines()[1:]]
    read = {row[0]: row[2] for row in rows if len(row) == 4}
    assert read["checkpoint"] == "engine: reference, model"
    assert read["train"] == "engine: reference, data, optimizer, checkpoint, model"
    score = "  average: {use: average.ema, takes: {engine: reference}}\n"
    two.write_text(two.read_text().replace("  checkpoint:\n", f"{score}  checkpoint:\n"))
    both = dag(two, "wrap=null", "train.takes={callback: null}", "--json")
    slots = {slot["slot"]: slot for slot in json.loads(both.stdout)["slots"]}
    assert slots["average"]["inputs"] == {"engine": "reference"}
    assert slots["train"]["inputs"]["engine"] == "average"
    assert slots["train"]["takes"] == {"callback": None}
    drawn = dag(two, "wrap=null", "--mermaid").stdout
    assert "  slot_reference -- Engine --> slot_average" in drawn
    assert "  slot_reference -- Engine --> slot_train" not in drawn


def test_a_run_and_overrides(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe.read_text().replace("./", f"{recipe.parent}/"))
    shown = dag(tmp_path, "wrap.use=wrap.fsdp", "export=null")
    assert shown.exit_code == 0, shown.stderr
    assert "wrap.fsdp" in shown.stdout
    assert "export" not in shown.stdout


def test_mistakes(recipe: Path) -> None:
    gone = dag("nothing.yaml")
    assert (gone.exit_code, gone.stdout) == (2, "")
    assert gone.stderr == "cannot read nothing.yaml: No such file or directory\n"
    broken = dag(recipe, "wrap=null")
    assert broken.exit_code == 2
    assert "needs a slot `wrap` before it" in broken.stderr

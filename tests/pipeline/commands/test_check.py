"""`pipe check`, `pipe show` and `pipe dag`. `pipe plan` is tested in tests/pipeline/planning."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from pipeline.cli import main
from pipeline.contracts.data import NO_TARGET, Sample
from pipeline.execution.in_process import documents
from pipeline.recipe import load_recipe
from stages.data.samples import MaskedSamples
from tests.stages.data.fakes import PLAIN, FakeSource, ids
from tests.support.runs import TINY
from tests.support.tiny_project import CHAIN, tiny_project


def test_json(good: Callable[..., Result]) -> None:
    checked = good("check", "r.yaml", "--json")
    chain = {
        "model": "model.fake", "data": "data.text", "optimizer": "optimizer.adam",
        "wrap": "wrap.red", "train": "train.lm",
    }  # fmt: skip
    assert checked.exit_code == 0
    assert json.loads(checked.stdout) == {
        "ok": True, "name": "good", "problems": [], "warnings": [], "notes": [],
        "stages": [{"slot": slot, "use": use} for slot, use in chain.items()],
    }  # fmt: skip
    broken = good("check", "r.yaml", "--json", "model.layer=0")
    problem = {
        "file": "command line, override 1", "line": None, "column": None, "key": "model.layer",
        "message": "unknown field", "hint": "did you mean `layers`?",
    }  # fmt: skip
    assert broken.exit_code == 2
    assert json.loads(broken.stdout) == {"ok": False, "problems": [problem]}


Call = Callable[..., Result]


def test_show_fills_in_defaults_and_runs_again(good: Call) -> None:
    result = good("show", "r.yaml", "train.shuffle=false")
    assert result.exit_code == 0
    here = Path.cwd()
    assert (
        result.stdout
        == f"""\
name: good
seed: 0
launch:
  procs: null
  nodes: null
  engine: null
  workers: null
  resources_per_worker: null
  max_failures: 3
  device: auto
  threads: null
  restarts:
    limit: 3
    backoff: 5.0
    max_backoff: 300.0
  timeouts:
    rendezvous: 600.0
    node: 10.0
    collectives: 1800.0
    step: 1800.0
    save: 1800.0
    load: 3600.0
env: [PIPE_SECRET]
dry_run: false
stages:
  model:
    use: model.fake
    path: null
    layers: 2
  data:
    use: data.text
    files: [{here}/a.txt]
    length: 4
    note: ${{oc.env:PIPE_SECRET}}
    split: none
  optimizer:
    use: optimizer.adam
    lr: 0.0001
    betas: [0.9, 0.999]
  wrap:
    use: wrap.red
    stage: 2
    offload:
      device: cpu
      path: null
      pin: true
    extra: null
  train:
    use: train.lm
    steps: 4
    shuffle: false
"""
    )
    Path("again.yaml").write_text(result.stdout, encoding="utf-8")
    assert good("show", "again.yaml").stdout == result.stdout
    assert good("check", "again.yaml").exit_code == 0


def test_show_origin(good: Call) -> None:
    result = good("show", "r.yaml", "train.shuffle=false", "--origin")
    comments = dict(line.split("  # ") for line in result.stdout.splitlines() if "  # " in line)
    origins = {line.strip(): place for line, place in comments.items()}
    assert origins["name: good"] == "r.yaml:1:7"
    assert origins["seed: 0"] == "default"
    assert origins["length: 4"] == "r.yaml:8:13"
    assert origins["steps: 4"] == "r.yaml:12:33"
    assert origins["stage: 2"] == "default"
    assert origins["device: cpu"] == "r.yaml:11:43"
    assert origins["pin: true"] == "default"
    assert origins["shuffle: false"] == "command line, override 1"
    Path("again.yaml").write_text(result.stdout, encoding="utf-8")
    assert load_recipe("again.yaml").stages["train"].fields == {"steps": 4, "shuffle": False}


def test_show_json(good: Call) -> None:
    shown = json.loads(good("show", "r.yaml", "--json").stdout)
    assert shown["stages"]["train"] == {"use": "train.lm", "steps": 4, "shuffle": True}
    assert shown["stages"]["data"]["note"] == "${oc.env:PIPE_SECRET}"
    both = json.loads(good("show", "r.yaml", "--json", "--origin").stdout)
    assert both["recipe"] == shown
    assert both["origins"]["stages.optimizer.lr"] == "r.yaml:10:40"
    assert both["origins"]["stages.wrap.stage"] == "default"


def test_show_of_a_run_folder(good: Call) -> None:
    Path("runs/one").mkdir(parents=True)
    Path("runs/one/recipe.yaml").write_text(load_recipe("r.yaml").dump(), encoding="utf-8")
    assert good("show", "runs/one").stdout == good("show", "r.yaml").stdout


def test_show_of_a_broken_recipe(good: Call) -> None:
    result = good("show", "r.yaml", "train.steps=0", "seed=x")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "command line, override 1: train.steps: must be at least 1, not `0`",
        "command line, override 2: seed: must be a whole number, not the text `x`",
    ]


ROWS = [[("user", "A"), ("assistant", "b\x1b[2J")], [("user", "Cé"), ("assistant", "d🎉")]]


@pytest.fixture
def show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Return a call of the command on a recipe of the fixture's rows; the model has no weights
    anywhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    FakeSource(PLAIN).fast.save_pretrained("tokenizer")
    rows = [[{"role": role, "content": content} for role, content in row] for row in ROWS]
    Path("rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    model = {"use": "model.hf", "config": {**TINY, "vocab_size": 259}, "tokenizer": "./tokenizer"}
    stages = {
        "model": model,
        "data": {"use": "data.chat", "files": "./rows.jsonl", "sequence_length": 64},
        "optimizer": {"use": "optimizer.adamw"},
    }
    Path("r.yaml").write_text(json.dumps({"name": "r", "stages": stages}))

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["show", *arguments], catch_exceptions=False)

    return run


def test_samples_with_marks(show: Call) -> None:
    result = show("r.yaml", "--data", "5")
    assert result.exit_code == 0, result.output
    assert "2 rows (messages), 56 tokens, 12 trained on" in result.stderr
    first, *samples = result.stdout.split("\n\n")
    assert first == "2 samples to train on, 0 held out"
    assert sorted(samples) == [
        "sample 0: 26 tokens, 6 to predict\n<|s|>user\nA<|e|>\n<|s|>assistant\n⟦b\\u001b[2J<|e|>⟧",
        "sample 1: 28 tokens, 6 to predict\n<|s|>user\nCé<|e|>\n<|s|>assistant\n⟦d🎉<|e|>⟧\n",
    ]


def test_documents_of_packed_samples(show: Call) -> None:
    result = show("r.yaml", "--data", "1", "data.packing=true")
    assert result.stdout == (
        "1 sample to train on, packed, 0 held out\n\n"
        "sample 0: 54 tokens, 12 to predict, 2 documents\n"
        "--- document 1 of 2\n<|s|>user\nA<|e|>\n<|s|>assistant\n⟦b\\u001b[2J<|e|>⟧\n"
        "--- document 2 of 2\n<|s|>user\nCé<|e|>\n<|s|>assistant\n⟦d🎉<|e|>⟧\n"
    )


def test_samples_as_json(show: Call) -> None:
    result = show("r.yaml", "--data", "1", "--json", "data.packing=true", "data.loss=all")
    shown = json.loads(result.stdout)
    assert (shown["samples"], shown["heldout"], shown["packed"]) == (1, 0, True)
    (sample,) = shown["shown"]
    assert (sample["place"], sample["index"]) == (0, 0)
    assert sample["input_ids"][:7] == [257, *ids("user\nA")]
    assert sample["labels"][:6] == ids("user\nA")
    assert sample["positions"][24:28] == [24, 25, 0, 1]


def test_columns_of_the_data(show: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = MaskedSamples.__getitem__

    def with_columns(self: MaskedSamples, index: int) -> Sample:
        sample = plain(self, index)
        return dataclasses.replace(
            sample,
            tokens={"weight": np.arange(len(sample.labels)) / 4},
            rows={"score": np.array([0.25]), "box": np.array([[1, 2]])},
            free={"pixels": np.ones((2, 3, 4))},
        )

    monkeypatch.setattr(MaskedSamples, "__getitem__", with_columns)
    _, first, _ = show("r.yaml", "--data", "5").stdout.split("\n\n")
    assert first.splitlines()[-4:] == [
        "score: 0.25",
        "box: 1, 2",
        "weight: 0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, ... (26)",
        "pixels: 1, 1, 1, 1, 1, 1, 1, 1, ... (2 x 3 x 4)",
    ]
    sample = json.loads(show("r.yaml", "--data", "1", "--json").stdout)["shown"][0]
    assert (sample["score"], sample["box"], sample["pixels"]) == ([0.25], [[1, 2]], [2, 3, 4])
    assert sample["weight"][:3] == [0, 0.25, 0.5]


def test_the_order_is_that_of_the_seed(show: Call) -> None:
    rows = "".join(json.dumps({"text": "xyz"}) + "\n" for _ in range(50))
    Path("rows.jsonl").write_text(rows)
    orders = [
        [each["index"] for each in json.loads(result.stdout)["shown"]]
        for result in (show("r.yaml", "--data", "9", "--json", f"seed={seed}") for seed in (1, 2))
    ]
    assert orders[0] != orders[1]
    assert all(len(set(order)) == 9 for order in orders)


def test_a_stream(show: Call) -> None:
    """Its samples are counted, and nothing is left behind."""
    Path("text.txt").write_text("abcdefgh")
    shards = ["data.use=data.stream", "data.shards=./text.txt"]
    result = show("r.yaml", "--data", "1", *shards, "data.sequence_length=4")
    assert result.stdout.startswith("a stream of samples to train on, 0 held out\n\nsample 0: ")
    assert "4 tokens, 4 to predict" in result.stdout
    assert not list(Path("cache/pipetrain").iterdir())
    short = ["r.yaml", "--data", "7", *shards, "data.sequence_length=2"]
    heads = [part.partition(":")[0] for part in show(*short).stdout.split("\n\n")[1:]]
    assert heads == [f"sample {place}" for place in range(7)]
    shown = json.loads(show(*short, "--json").stdout)["shown"]
    assert [each["place"] for each in shown] == list(range(7))
    assert [each["index"] >> 40 for each in shown] == [0] * 4 + [1] * 3  # the window's number


def test_mistakes_of_the_data(show: Call) -> None:
    broken = show("r.yaml", "--data", "1", "data.packing=3")
    assert (broken.exit_code, broken.stdout) == (2, "")
    assert "data.packing" in broken.stderr
    Path("rows.jsonl").write_text("{}")
    row = show("r.yaml", "--data", "1")
    assert (row.exit_code, row.stdout) == (1, "")
    assert "rows.jsonl:1: fits no form; it has nothing" in row.stderr
    Path("bare.yaml").write_text("name: bare\nstages: {optimizer: {use: optimizer.adamw}}\n")
    bare = show("bare.yaml", "--data", "1")
    assert (bare.exit_code, bare.stderr) == (2, "error: no slot of this recipe provides data\n")


def test_what_is_trained_on_is_a_token_further_than_its_label() -> None:
    sample = Sample(
        input_ids=np.array([5, 6, 7, 8, 9]),
        labels=np.array([6, NO_TARGET, NO_TARGET, 9, 4]),
        positions=np.array([0, 1, 0, 1, 2]),
    )
    assert list(documents(sample)) == [
        [(5, False), (6, True)],
        [(7, False), (8, False), (9, True), (4, True)],
    ]


def test_samples_of_each_training(show: Call) -> None:
    """The second's data need the tokenizer of a model that nothing trains here."""
    stages = json.loads(Path("r.yaml").read_text())["stages"]
    training = {
        "precision": {"use": "precision.policy"},
        "wrap": {"use": "wrap.ddp"},
        "checkpoint": {"use": "checkpoint.sharded"},
        "train": {"use": "train.causal_lm", "steps": 1, "global_batch_size": 1},
    }
    again = {f"{slot}2": spec for slot, spec in training.items() if slot != "precision"}
    trained = {"trained": {"use": "model.trained"}, "rest": {**stages["data"], "packing": True}}
    both = {"name": "r", "stages": stages | training | trained | again}
    Path("both.yaml").write_text(json.dumps(both))
    result = show("both.yaml", "--data", "1")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "data: 2 samples to train on, 0 held out" in lines
    assert "rest: 1 sample to train on, packed, 0 held out" in lines
    slots = json.loads(show("both.yaml", "--data", "1", "--json").stdout)["slots"]
    assert [(slot, len(one["shown"])) for slot, one in slots.items()] == [("data", 1), ("rest", 1)]
    check = ["check", "both.yaml", "--data"]
    assert CliRunner().invoke(main, check).output.splitlines()[-2:] == [
        "data: 2 samples to train on, 0 held out",
        "rest: 1 sample to train on, packed, 0 held out",
    ]
    facts = json.loads(CliRunner().invoke(main, [*check, "--json"]).stdout)
    assert (facts["data"]["samples"], facts["data"]["slots"]["rest"]["samples"]) == (2, 1)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def test_dag_as_text(chain: Path) -> None:
    shown = dag(chain)
    assert shown.exit_code == 0
    head, *rows = shown.stdout.splitlines()
    assert head.split() == ["slot", "stage", "reads", "returns"]
    cells = [re.split(r"  +", row) for row in rows]
    assert [row[:2] for row in cells] == [[slot, f["use"]] for slot, f in CHAIN.items()]
    assert {row[0]: row[2].split(", ") for row in cells if len(row) == 4} == READS
    assert [row[-1] for row in cells][4:7] == ["Engine", "Checkpoints", "TrainedRun"]


def test_dag_as_mermaid(chain: Path) -> None:
    shown = dag(chain, "--mermaid")
    head, *lines = shown.stdout.splitlines()
    assert head == "flowchart LR"
    node = '  slot_{0}["{0}<br><small>{1}</small>"]'
    assert lines[: len(CHAIN)] == [node.format(slot, f["use"]) for slot, f in CHAIN.items()]
    edges = [
        re.fullmatch(r"  slot_(\w+) -- \w+ --> slot_(\w+)", one) for one in lines[len(CHAIN) :]
    ]
    drawn = {edge.groups() for edge in edges if edge}
    assert drawn == {(read, slot) for slot, read_by in READS.items() for read in read_by}
    assert "  slot_wrap -- Engine --> slot_train" in lines


def test_dag_as_json(chain: Path) -> None:
    found = json.loads(dag(chain, "--json").stdout)
    assert (found["schema_version"], found["name"]) == (1, "tiny")
    assert [slot["slot"] for slot in found["slots"]] == list(CHAIN)
    by_name = {slot["slot"]: slot for slot in found["slots"]}
    assert by_name["train"]["inputs"] == {
        "engine": "wrap", "data": "data", "optimizer": "optimizer", "checkpoints": "checkpoint",
        "model": "model", "callback": None,
    }  # fmt: skip
    assert by_name["wrap"]["returns"] == "Engine"


def test_dag_of_two_engines(chain: Path) -> None:
    """The first is only read where `takes` names it."""
    text = chain.read_text()
    first = "  reference: {use: wrap.fsdp}\n"
    two = chain.with_name("two.yaml")
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


def test_dag_of_a_run_and_overrides(chain: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(chain.read_text().replace("./", f"{chain.parent}/"))
    shown = dag(tmp_path, "wrap.use=wrap.fsdp", "export=null")
    assert shown.exit_code == 0, shown.stderr
    assert "wrap.fsdp" in shown.stdout
    assert "export" not in shown.stdout


def test_mistakes_of_the_dag(chain: Path) -> None:
    gone = dag("nothing.yaml")
    assert (gone.exit_code, gone.stdout) == (2, "")
    assert gone.stderr == "cannot read nothing.yaml: No such file or directory\n"
    broken = dag(chain, "wrap=null")
    assert broken.exit_code == 2
    assert "needs a slot `wrap` before it" in broken.stderr

"""`pipe show --data`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from pipeline import cli
from pipeline.contracts.data import NO_TARGET, Sample
from pipeline.execution.in_process import documents
from stages.data.samples import MaskedSamples
from tests.stages.data.fakes import PLAIN, FakeSource, ids
from tests.support.runs import TINY

ROWS = [[("user", "A"), ("assistant", "b\x1b[2J")], [("user", "Cé"), ("assistant", "d🎉")]]


@pytest.fixture
def show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
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
        return CliRunner().invoke(cli.main, ["show", *arguments], catch_exceptions=False)

    return run


def test_samples_with_marks(show: Any) -> None:
    result = show("r.yaml", "--data", "5")
    assert result.exit_code == 0, result.output
    assert "2 rows (messages), 56 tokens, 12 trained on" in result.stderr
    first, *samples = result.stdout.split("\n\n")
    assert first == "2 samples to train on, 0 held out"
    assert sorted(samples) == [
        "sample 0: 26 tokens, 6 to predict\n<|s|>user\nA<|e|>\n<|s|>assistant\n⟦b\\u001b[2J<|e|>⟧",
        "sample 1: 28 tokens, 6 to predict\n<|s|>user\nCé<|e|>\n<|s|>assistant\n⟦d🎉<|e|>⟧\n",
    ]


def test_documents_of_packed_samples(show: Any) -> None:
    result = show("r.yaml", "--data", "1", "data.packing=true")
    assert result.stdout == (
        "1 sample to train on, packed, 0 held out\n\n"
        "sample 0: 54 tokens, 12 to predict, 2 documents\n"
        "--- document 1 of 2\n<|s|>user\nA<|e|>\n<|s|>assistant\n⟦b\\u001b[2J<|e|>⟧\n"
        "--- document 2 of 2\n<|s|>user\nCé<|e|>\n<|s|>assistant\n⟦d🎉<|e|>⟧\n"
    )


def test_json(show: Any) -> None:
    result = show("r.yaml", "--data", "1", "--json", "data.packing=true", "data.loss=all")
    shown = json.loads(result.stdout)
    assert (shown["samples"], shown["heldout"], shown["packed"]) == (1, 0, True)
    (sample,) = shown["shown"]
    assert (sample["place"], sample["index"]) == (0, 0)
    assert sample["input_ids"][:7] == [257, *ids("user\nA")]
    assert sample["labels"][:6] == ids("user\nA")
    assert sample["positions"][24:28] == [24, 25, 0, 1]


def test_columns_of_the_data(show: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_order_is_that_of_the_seed(show: Any) -> None:
    rows = "".join(json.dumps({"text": "xyz"}) + "\n" for _ in range(50))
    Path("rows.jsonl").write_text(rows)
    orders = [
        [each["index"] for each in json.loads(result.stdout)["shown"]]
        for result in (show("r.yaml", "--data", "9", "--json", f"seed={seed}") for seed in (1, 2))
    ]
    assert orders[0] != orders[1]
    assert all(len(set(order)) == 9 for order in orders)


def test_a_stream_leaves_nothing_behind(show: Any) -> None:
    Path("text.txt").write_text("abcdefgh")
    shards = ["data.use=data.stream", "data.shards=./text.txt", "data.sequence_length=4"]
    result = show("r.yaml", "--data", "1", *shards)
    assert result.stdout.startswith("a stream of samples to train on, 0 held out\n\nsample 0: ")
    assert "4 tokens, 4 to predict" in result.stdout
    assert not list(Path("cache/pipetrain").iterdir())


def test_samples_of_a_stream_are_counted(show: Any) -> None:
    Path("text.txt").write_text("abcdefgh")
    shards = ["data.use=data.stream", "data.shards=./text.txt", "data.sequence_length=2"]
    result = show("r.yaml", "--data", "7", *shards)
    heads = [part.partition(":")[0] for part in result.stdout.split("\n\n")[1:]]
    assert heads == [f"sample {place}" for place in range(7)]
    shown = json.loads(show("r.yaml", "--data", "7", "--json", *shards).stdout)["shown"]
    assert [each["place"] for each in shown] == list(range(7))
    assert [each["index"] >> 40 for each in shown] == [0] * 4 + [1] * 3  # the window's number


def test_mistakes(show: Any) -> None:
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


def test_samples_of_each_training(show: Any) -> None:
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
    checked = CliRunner().invoke(cli.main, ["check", "both.yaml", "--data"])
    assert checked.output.splitlines()[-2:] == [
        "data: 2 samples to train on, 0 held out",
        "rest: 1 sample to train on, packed, 0 held out",
    ]
    facts = json.loads(
        CliRunner().invoke(cli.main, ["check", "both.yaml", "--data", "--json"]).stdout
    )
    assert (facts["data"]["samples"], facts["data"]["slots"]["rest"]["samples"]) == (2, 1)

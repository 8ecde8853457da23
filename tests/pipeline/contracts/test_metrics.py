"""Metrics after a crash and a resume."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.contracts.metrics import Metrics, record_training, records
from pipeline.view.ending import before_and_after


def test_rewind_leaves_one_record_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    for step in range(1, 6):
        metrics.write_training({"step": step, "loss": 1.0 / step})
    metrics.write_training({"step": 4, "eval_loss": 2.0})
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    metrics.rewind(4)
    kept = [{"step": step, "loss": 1.0 / step} for step in range(1, 5)]
    assert list(records(path)) == [*kept, {"step": 4, "eval_loss": 2.0}]
    metrics.write_training({"step": 5, "loss": 9.0})
    assert [r["step"] for r in records(path) if "loss" in r] == [1, 2, 3, 4, 5]
    metrics.rewind(0)
    assert path.read_text() == ""


def test_without_a_path_nothing_is_written(tmp_path: Path) -> None:
    metrics = Metrics(None)
    metrics.write({"step": 1})
    metrics.rewind(0)
    Metrics(tmp_path / "new.jsonl").rewind(3)
    assert list(tmp_path.iterdir()) == []


def test_lines_that_are_none_of_ours_are_kept_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    text = b'{"step": 1, "loss": 2.0}\n\xff\n{"step": "x"}\n[]\n{"step": 2, "loss": "y"}\n{"st'
    path.write_bytes(text)
    assert list(records(path)) == [{"step": 1, "loss": 2.0}]
    Metrics(path).rewind(5)
    assert list(records(path)) == [{"step": 1, "loss": 2.0}]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == text
    said = f"{path}: left out 4 lines without metrics; kept in {path}.damaged"
    assert [record.getMessage() for record in caplog.records] == [said]
    Metrics(path).rewind(5)
    assert len(caplog.records) == 1


def test_lines_are_not_kept_through_a_link(tmp_path: Path) -> None:
    """The sender of a run chooses the lines and the target of the link."""
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / "metrics.jsonl.damaged").symlink_to(target)
    path = tmp_path / "metrics.jsonl"
    path.write_text("theirs\n")
    with pytest.raises(OSError, match="nothing is written through links"):
        Metrics(path).rewind(5)
    assert target.read_text() == "mine"


def test_numbers_of_other_libraries_are_taken(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write(
        {"step": 1, "a": np.float32(0.5), "b": torch.tensor(2), "c": float("nan"), "d": np.inf}
    )
    written = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert written == {"step": 1, "a": 0.5, "b": 2, "c": None, "d": None}


@pytest.mark.parametrize("record", [{"a": 1.0}, {"step": None}, {"step": "1"}, {"step": True}])
def test_a_record_needs_a_step(tmp_path: Path, record: dict[str, object]) -> None:
    with pytest.raises(TypeError, match="needs an integer `step`"):
        Metrics(tmp_path / "metrics.jsonl").write(record)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("path", ["metrics.jsonl", None])
@pytest.mark.parametrize("name", ["loss", "best_step", "ended_early", "generated", "mfu"])
def test_a_plugin_does_not_write_the_training_s_numbers(
    tmp_path: Path, path: str | None, name: str
) -> None:
    metrics = Metrics(tmp_path / path if path else None)
    with pytest.raises(ValueError, match=f"`{name}` is a name of the training's numbers"):
        metrics.write({"step": 1, name: 1.0, "mine": 2.0})
    assert list(tmp_path.iterdir()) == []
    metrics.write({"step": 1, "time": 5.0, "mine": 2.0})
    assert list(records(tmp_path / "metrics.jsonl") if path else []) == (
        [{"step": 1, "time": 5.0, "mine": 2.0}] if path else []
    )


@pytest.mark.parametrize("number", [None, "0", 0.0, True, 10**400])
def test_texts_without_a_number_are_left_out(tmp_path: Path, number: object) -> None:
    one = {"prompt": "Who?", "text": "I"} | ({} if number is None else {"number": number})
    whole = {"step": 1, "generated": [{"number": 0, "prompt": "Who?", "text": "I"}]}
    lines = (json.dumps({"step": step, "generated": [one]}) for step in (0, 4))
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join([*lines, json.dumps(whole), ""]))
    assert list(records(path)) == [whole]
    assert list(before_and_after(records(path))) == []
    path.write_text('{"step": 1, "loss": 1.0, "slot": 3}\n{"step": 1, "loss": 1.0}\n')
    assert {record_training(one) for one in records(path)} == {""}  # a slot that is no text


def test_a_training_rewinds_its_own_records_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first, second = Metrics(path), Metrics(path, "chat")
    for step in (1, 2, 3):
        first.write_training({"step": step, "loss": 1.0})
    for step in (1, 2):
        second.write_training({"step": step, "loss": 2.0})
    second.write({"step": 2, "accuracy": 0.5})
    second.rewind(1)
    ours = [{"step": step, "loss": 1.0} for step in (1, 2, 3)]
    further = [{"step": 1, "loss": 2.0, "slot": "chat"}]
    assert list(records(path)) == [*ours, *further]
    first.rewind(-1)
    assert list(records(path)) == further
    first.write_length(0, 9)
    second.write_length(1, 9)
    assert [record.get("slot") for record in records(path)] == ["chat", None, "chat"]
    with pytest.raises(ValueError, match="`slot` is a name of the training's numbers"):
        first.write({"step": 1, "slot": "mine"})

"""The last lines about a run that has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.utils.text import shown_path
from pipeline.view.ending import next_lines, outcome
from tests.pipeline.view.folders import made, step


def test_what_came_out(tmp_path: Path) -> None:
    records = [
        {"step": 0, "eval_loss": 4.0, "best_step": 0, "best_eval_loss": 4.0},
        step(1, tokens_per_second=100.0),
        step(2, tokens_per_second=300.0, step_seconds=6.0),
        {"step": 2, "accuracy": 0.5},
        {"step": 2, "eval_loss": 3.0, "best_step": 2, "best_eval_loss": 3.0},
    ]
    assert dict(outcome(made(tmp_path / "run", [], records))) == {
        "steps": "2 of 20, 250 tokens/s (mean)",
        "held-out loss": "4.0000 (step 0) -> 3.0000 (step 2)",
        "accuracy": "0.5 at step 2",
    }
    worse = {"step": 3, "eval_loss": 3.5, "best_step": 2, "best_eval_loss": 3.0}
    found = dict(outcome(made(tmp_path / "worse", [], [*records, worse])))
    assert found["held-out loss"] == "4.0000 (step 0) -> 3.5000 (step 3), best 3.0000 (step 2)"
    once = dict(outcome(made(tmp_path / "once", [], records[:1])))
    assert once == {"held-out loss": "4.0000 (step 0)"}
    assert dict(outcome(tmp_path)) == {}


def test_a_training_that_ended_early(tmp_path: Path) -> None:
    end = {"step": 2, "time": 9.0, "ended_early": "enough"}
    found = dict(outcome(made(tmp_path / "run", [], [step(1), step(2), end])))
    assert found["ended early"] == "enough"
    assert found["steps"].startswith("2 of 20, ")
    on = dict(outcome(made(tmp_path / "on", [], [step(1), step(2), end, step(3)])))
    assert "ended early" not in on


def test_what_to_do_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a run"
    folder.mkdir()
    assert next_lines(folder, "finished") == []
    (folder / "report.html").touch()
    assert next_lines(folder, "running") == []
    monkeypatch.chdir(tmp_path)
    assert next_lines(folder, "finished") == [("report", "a run/report.html")]
    going_on = ("continue", "pipe resume 'a run'")
    for state in ("failed", "stopped"):
        assert next_lines(folder, state)[1:] == [going_on]  # type: ignore[arg-type]


def test_paths_in_the_working_folder_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown_path(tmp_path / "a" / "b") == "a/b"
    assert shown_path(tmp_path) == "."
    assert shown_path(tmp_path.parent / "other") == str(tmp_path.parent / "other")
    assert shown_path(Path("a")) == "a"

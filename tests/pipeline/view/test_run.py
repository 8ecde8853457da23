"""Two trainings of a run are shown by the slots that train, and none of their numbers are mixed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from pipeline.cli import main
from pipeline.execution.journal import Journal
from pipeline.view.ending import outcome
from pipeline.view.report.compare import comparison_page, results
from pipeline.view.report.facts import marks, summary
from pipeline.view.report.folder_report import runs_in
from pipeline.view.report.run_report import _gpu_plots, _plots, run_page
from pipeline.view.run import History, Run
from tests.pipeline.view.folders import RECIPE, SLOTS, add, made, step

SECOND = {
    "trained": "model.trained", "chats": "data.chat", "wrap2": "wrap.fsdp",
    "chat": "train.causal_lm",
}  # fmt: skip
BOTH: dict[str, Any] = {
    **RECIPE, "stages": {slot: {"use": use} for slot, use in (SLOTS | SECOND).items()},
}  # fmt: skip


def save(number: int, seconds: float, **more: Any) -> list[dict[str, Any]]:
    begun = {"step": number, "time": 1000.0 + number, "checkpoint_stall_seconds": 0.5, **more}
    return [begun, {**begun, "checkpoint_seconds": seconds}]


FIRST = [
    step(1, total_steps=2), step(2, total_steps=2, best_step=2, best_eval_loss=3.5),
    {"step": 2, "eval_loss": 3.5, "perplexity": 33.0, "best_step": 2, "best_eval_loss": 3.5},
    *save(2, 4.0),
]  # fmt: skip
FURTHER = [
    {**record, "slot": "chat"}
    for record in (
        step(1, loss=1.5, total_steps=9, time=1100.0, peak_memory_bytes=1 << 30),
        step(2, loss=1.25, total_steps=9, time=1101.0, peak_memory_bytes=1 << 30),
        {"step": 2, "time": 1101.0, "ended_early": "it is enough"},
        {"step": 2, "time": 1101.0, "accuracy": 0.5},
        *save(2, 8.0),
    )
]


def run(folder: Path) -> Path:
    events = [{"event": "run started", "time": 900.0, "procs": 2, "device": "cpu"},
              {"event": "slot started", "time": 901.0, "slot": "chat", "use": "train.causal_lm"},
              {"event": "run stopped", "time": 1200.0, "problem": ""}]  # fmt: skip
    return made(folder, events, [*FIRST, *FURTHER], BOTH)


def test_a_history_has_both(tmp_path: Path) -> None:
    history = History(run(tmp_path / "run"))
    first, second = history.trainings
    assert (first.label, second.label) == ("train", "chat")
    assert [[one["loss"] for one in each.steps] for each in (first, second)] == [
        [3.9, 3.8], [1.5, 1.25],
    ]  # fmt: skip
    assert (first.ended_early, second.ended_early) == ("", "it is enough")
    assert first.best == {"step": 2, "eval_loss": 3.5}
    assert (second.best, second.evaluations) == (None, [])
    assert history.steps == second.steps  # the newest
    once = History(made(tmp_path / "once", (), FIRST))
    assert [each.label for each in once.trainings] == [""]


def test_the_end_tells_what_each_measured(tmp_path: Path) -> None:
    assert dict(outcome(run(tmp_path / "run"))) == {
        "train steps": "2, 512 tokens/s (mean)",
        "train held-out loss": "3.5000 (step 2)",
        "chat steps": "2 of 9, 512 tokens/s (mean)",
        "chat ended early": "it is enough",
        "chat accuracy": "0.5 at step 2",
    }


def test_a_report_has_curves_numbers_and_saves_of_each(tmp_path: Path) -> None:
    history = History(run(tmp_path / "run"))
    plots = {plot.title: plot.series[0].curve for plot in _plots(history)}
    assert (plots["train Loss"].steps, plots["train Loss"].mean) == ([1, 2], [3.9, 3.8])
    assert (plots["chat Loss"].steps, plots["chat Loss"].mean) == ([1, 2], [1.5, 1.25])
    assert (plots["chat accuracy"].steps, "train accuracy" in plots) == ([2], False)
    tiles = {tile.label: tile.value for tile in summary(history)}
    assert (tiles["train steps"], tiles["chat steps"]) == ("2 of 2", "2 of 9")
    assert (tiles["train training loss"], tiles["chat training loss"]) == ("3.8000", "1.2500")
    found = {mark.kind: mark.text for mark in marks(history)}
    assert found["train save"].startswith("on disk after 4.00 s")
    assert found["chat save"].startswith("on disk after 8.00 s")
    assert "chat Loss" in run_page(history)
    readings = [
        {"step": 1, "gpus": [{"index": 0, "watts": 100.0}]},
        {"step": 1, "slot": "chat", "gpus": [{"index": 0, "watts": 300.0}]},
    ]
    watts = {plot.title: plot.series[0].curve.mean for plot in _gpu_plots(history, readings)}
    assert watts == {"train Power of a GPU": [100.0], "chat Power of a GPU": [300.0]}


def test_a_display_follows_the_newest(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", (), FIRST, BOTH)
    follower = Run(folder, SLOTS | SECOND)
    follower.look()
    training = follower.training
    assert (training.slot, training.step["loss"], len(training.steps)) == ("", 3.8, 2)
    add(folder, FURTHER)
    follower.look()
    training = follower.training
    assert (training.slot, training.step["loss"]) == ("chat", 1.25)
    assert [(one["step"], one["loss"]) for one in training.steps] == [(1, 1.5), (2, 1.25)]
    assert ("evaluation" in training.newest, training.speed.steps) == (False, 2)


def test_commands_name_the_newest(tmp_path: Path) -> None:
    folder = run(tmp_path / "run")

    def pipe(*arguments: str) -> Any:
        return CliRunner().invoke(main, list(arguments)).output

    assert "chat step 2  loss 1.2500" in pipe("ls", str(tmp_path))
    (listed,) = json.loads(pipe("ls", str(tmp_path), "--json"))
    assert (listed["training"], listed["step"], listed["best"]) == ("chat", 2, None)
    assert json.loads(pipe("status", str(folder), "--json"))["training"] == "chat"
    shown = pipe("status", str(folder))
    assert "chat" in shown
    assert "step 2 of 9" in shown
    (found,) = runs_in(tmp_path)
    assert found.history is not None


def test_runs_are_compared_training_by_training(tmp_path: Path) -> None:
    both = History(run(tmp_path / "both"))
    once = History(made(tmp_path / "once", (), [step(1), step(2, loss=3.0)]))
    rows = {row.name: row.values for row in results([both, once])}
    assert rows["train training loss"] == ("3.8000", "3.0000")
    assert rows["chat training loss"] == ("1.2500", "-")
    page = comparison_page([both, once])
    assert "train Training loss" in page
    assert "chat Training loss" in page
    assert "training loss" in {row.name for row in results([once, once])}


def test_a_slot_whose_stage_is_not_installed(tmp_path: Path) -> None:
    gone = {**BOTH, "stages": {"train": {"use": "gone.stage"}, "chat": {"use": "gone.too"}}}
    history = History(made(tmp_path / "run", (), [*FIRST, *FURTHER], gone))
    assert [each.label for each in history.trainings] == ["the first training", "chat"]
    assert Journal(history.folder / "journal.jsonl").events() == []

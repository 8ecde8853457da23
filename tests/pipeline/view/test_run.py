"""A run by its folder. Two trainings are shown by the slots that train, and none of their numbers
are mixed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from pipeline.cli import main
from pipeline.execution.journal import Journal
from pipeline.execution.run_state import MeanSpeed
from pipeline.utils.files import replace_text
from pipeline.view.compare import comparison_page, results
from pipeline.view.ending import outcome
from pipeline.view.run import History, Run
from pipeline.view.run_report import report_plots, run_page, summary, timeline
from tests.pipeline.view.folders import (
    EVENTS,
    METRICS,
    RECIPE,
    SLOTS,
    TRAINING,
    add,
    evaluation,
    made,
    step,
)

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
    evaluation(2, 3.5, 2, 3.5), *save(2, 4.0),
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


def test_the_times_of_all_starts_count(tmp_path: Path) -> None:
    history = History(made(tmp_path / "run", EVENTS, METRICS))
    assert history.busy_seconds == 30.0 + 22.0
    assert history.slots["train"].seconds == 25.0 + 20.0
    assert history.slots["model"].seconds == 3.0


def test_a_start_that_was_killed_ends_at_its_last_sign_of_life(tmp_path: Path) -> None:
    killed = [dict(one) for one in EVENTS if one["event"] != "run failed"]
    later = 90_000.0  # a day after it
    for event, time in zip(killed[len(TRAINING) :], (0.0, 1.0, 21.0, 22.0), strict=True):
        event["time"] = later + time
    history = History(made(tmp_path / "run", killed, METRICS))
    assert history.busy_seconds == 20.0 + 22.0  # a checkpoint at 1020
    assert history.slots["train"].seconds == 15.0 + 20.0
    assert [mark.kind for mark in timeline(history)][:3] == ["start", "save", "stop"]


def test_a_run_that_was_killed_and_not_resumed(tmp_path: Path) -> None:
    history = History(made(tmp_path / "run", TRAINING, METRICS))
    assert history.state == "stopped"
    assert history.slots["train"].state == "stopped"
    assert history.busy_seconds == 20.0
    assert History(made(tmp_path / "early", TRAINING)).busy_seconds == 5.0


def test_a_resumed_run_forgets_what_it_repeats(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", TRAINING, [step(number) for number in range(1, 6)])
    run = Run(folder, SLOTS)
    run.look()
    assert (run.training.step["step"], run.training.speed.steps) == (5, 5)
    replace_text(folder / "metrics.jsonl", "")
    add(folder, [step(1), step(2)])
    run.look()
    assert [one["step"] for one in run.training.steps] == [1, 2]
    assert run.training.speed.steps == 2
    assert run.seconds_left == 36.0


def test_the_mean_speed_is_tokens_by_time() -> None:
    speed = MeanSpeed()
    for record in (
        {"step_seconds": 1.0, "tokens_per_second": 100.0, "mfu": 0.5},
        {"step_seconds": 3.0, "tokens_per_second": 300.0},
        {"tokens_per_second": 1e9},
    ):
        speed.add(record)
    assert (speed.mean("tokens_per_second"), speed.mean("mfu")) == (250.0, 0.5)
    assert (speed.steps, speed.seconds, speed.mean("data_wait_share")) == (2, 4.0, None)


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
    readings = [
        {"step": 1, "gpus": [{"index": 0, "watts": 100.0}]},
        {"step": 1, "slot": "chat", "gpus": [{"index": 0, "watts": 300.0}]},
    ]
    plots = {plot.title: plot.curves[0] for plot in report_plots(history, readings)}
    assert (plots["train Loss"].steps, plots["train Loss"].mean) == ([1, 2], [3.9, 3.8])
    assert (plots["chat Loss"].steps, plots["chat Loss"].mean) == ([1, 2], [1.5, 1.25])
    assert (plots["chat accuracy"].steps, "train accuracy" in plots) == ([2], False)
    watts = {title: plot.mean for title, plot in plots.items() if "Power" in title}
    assert watts == {"train Power of a GPU": [100.0], "chat Power of a GPU": [300.0]}
    tiles = {label: value for label, value, _ in summary(history)}
    assert (tiles["train steps"], tiles["chat steps"]) == ("2 of 2", "2 of 9")
    assert (tiles["train training loss"], tiles["chat training loss"]) == ("3.8000", "1.2500")
    found = {mark.kind: mark.text for mark in timeline(history)}
    assert found["train save"].startswith("on disk after 4.00 s")
    assert found["chat save"].startswith("on disk after 8.00 s")
    assert "chat Loss" in run_page(history)


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

"""Feeding trackers: what is sent, once, whatever happens to the run and to the tracker."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pipeline.track import Outcome, RunFacts, Tracker
from pipeline.track.feeder import Feeder
from pipeline.utils.files import replace_text
from tests.pipeline.view.folders import add, made, step


@dataclass
class Noted(Tracker):
    """Keeps what it is told."""

    logged: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    texts: list[tuple[int, str, str]] = field(default_factory=list)
    opened: list[Mapping[str, Any]] = field(default_factory=list)
    ended: list[Outcome] = field(default_factory=list)

    def open(self, run: RunFacts, state: Mapping[str, Any]) -> Mapping[str, Any]:
        self.opened.append(state)
        return {"id": "a run of theirs"}

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        self.logged.append((step, dict(metrics)))

    def log_text(self, step: int, name: str, text: str) -> None:
        self.texts.append((step, name, text))

    def close(self, outcome: Outcome) -> None:
        self.ended.append(outcome)


def feeder(folder: Path, tracker: Tracker, every: int = 1) -> Feeder:
    found = Feeder(folder, "track", every, tracker)
    found.open(RunFacts(name="run", recipe={}, environment={}, folder=folder))
    return found


def sent(folder: Path, outcome: Outcome = "finished", every: int = 1) -> Noted:
    """Return a tracker that was sent what is new, and the end of the run."""
    tracker = Noted()
    feeder(folder, tracker, every).close(outcome)
    return tracker


def steps(tracker: Noted) -> list[int]:
    return [number for number, _ in tracker.logged]


def losses(tracker: Noted) -> list[tuple[int, float]]:
    return [(number, found["loss"]) for number, found in tracker.logged if "loss" in found]


def test_numbers_are_sent_and_nothing_else(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    add(folder, [step(1, applied=True, mfu=None, best_step=1, best_eval_loss=2.0)])
    add(folder, [{"step": 1, "eval_loss": 2.0, "perplexity": 7.4, "best_step": 1}])
    add(folder, [{"step": 1, "generated": [{"number": 0, "prompt": "Once ", "text": "upon"}]}])
    tracker = sent(folder)
    numbers = {"grad_norm": 0.5, "lr": 1e-05, "tokens": 1000.0, "samples": 8.0,
               "step_seconds": 2.0, "loss": 3.9, "tokens_per_second": 512.0,
               "data_wait_share": 0.01}  # fmt: skip
    assert tracker.logged == [(1, numbers), (1, {"eval/loss": 2.0, "perplexity": 7.4})]
    assert tracker.texts == [(1, "generated/0", "Once upon")]
    assert tracker.ended == ["finished"]


def test_numbers_of_several_plugins_are_sent(tmp_path: Path) -> None:
    folder, tracker = made(tmp_path / "run"), Noted()
    add(folder, [{"step": 1, "accuracy": 0.5}, {"step": 1, "entropy": 2}])
    add(folder, [{"step": 1, "best_score": 3}])
    add(folder, [{"step": 2, "entropy": 1}])
    feeder(folder, tracker).close("stopped")
    add(folder, [{"step": 2, "accuracy": 0.75}])
    feeder(folder, tracker).close("finished")
    assert tracker.logged == [
        (1, {"accuracy": 0.5}),
        (1, {"entropy": 2.0}),
        (1, {"best_score": 3.0}),
        (2, {"entropy": 1.0}),
        (2, {"accuracy": 0.75}),
    ]


def test_a_resumed_run_goes_on_in_the_same_run(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", (), [step(n) for n in range(1, 6)])
    first, second = sent(folder, "failed"), Noted()
    replace_text(folder / "metrics.jsonl", "")  # the resume goes back to step 3
    add(folder, [step(n) for n in range(1, 4)])
    fed = feeder(folder, second)
    fed.feed()
    assert second.logged == []
    add(folder, [step(n) for n in range(4, 8)])
    fed.close("finished")
    assert (steps(first), steps(second)) == ([1, 2, 3, 4, 5], [6, 7])
    assert (first.opened, second.opened) == ([{}], [{"id": "a run of theirs"}])


def test_nothing_is_sent_twice_when_a_feeder_is_killed(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", (), [step(1), step(2)])
    feeder(folder, Noted()).feed()
    add(folder, [step(3)])
    assert steps(sent(folder)) == [3]


def test_what_was_sent_before_an_error_is_not_sent_again(tmp_path: Path) -> None:
    class Breaking(Noted):
        def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
            if step == 3:
                raise ConnectionError

    folder = made(tmp_path / "run", (), [step(n) for n in range(1, 5)])
    with pytest.raises(ConnectionError):
        feeder(folder, Breaking()).feed()
    assert steps(sent(folder)) == [3, 4]


def test_an_evaluation_that_was_not_sent_yet_is_made_up_for(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", (), [step(1), step(2)])
    sent(folder, "failed")
    add(folder, [{"step": 2, "eval_loss": 3.0}, step(3)])
    assert [(number, "loss" in found) for number, found in sent(folder).logged] == [
        (2, False), (3, True)
    ]  # fmt: skip


def test_a_restart_within_a_run_sends_nothing_twice(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", (), [step(1), step(2), step(3)])
    tracker = Noted()
    fed = feeder(folder, tracker)
    fed.feed()
    replace_text(folder / "metrics.jsonl", "")
    add(folder, [step(1), step(2), step(3), step(4)])
    fed.close("finished")
    assert steps(tracker) == [1, 2, 3, 4]


WENT_BACK = {"step": 2, "anomaly": "loss spike", "action": "rollback", "samples_to": 32}


def test_steps_after_a_rollback_are_sent_again_once(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", (), [step(n, loss=3.0) for n in (1, 2, 3)])
    tracker = Noted()
    fed = feeder(folder, tracker)
    fed.feed()
    replace_text(folder / "metrics.jsonl", "")
    begin = [step(1, loss=3.0), {**WENT_BACK, "time": 100.0}]
    add(folder, [*begin, *(step(n, loss=2.0) for n in (2, 3, 4))])
    fed.close("failed")
    assert losses(tracker) == [(1, 3.0), (2, 3.0), (3, 3.0), (2, 2.0), (3, 2.0), (4, 2.0)]
    assert sent(folder).logged == []


def test_a_rollback_that_a_resumed_run_repeats_leaves_the_newest_numbers(tmp_path: Path) -> None:
    """Killed after the rollback and before the next save, the run goes through it once more."""
    folder = made(tmp_path / "run", (), [step(n, loss=3.0) for n in (1, 2, 3, 4, 5)])
    tracker = Noted()
    fed = feeder(folder, tracker)
    fed.feed()
    for time in (100.0, 200.0):
        replace_text(folder / "metrics.jsonl", "")
        add(folder, [step(n, loss=3.0) for n in (1, 2, 3, 4, 5)])
        fed.feed()
        replace_text(folder / "metrics.jsonl", "")
        add(folder, [step(1, loss=3.0), {**WENT_BACK, "time": time}, step(2, loss=2.0)])
        fed.feed()
    add(folder, [step(n, loss=2.0) for n in (3, 4, 5, 6)])
    fed.close("finished")
    assert dict(losses(tracker)) == {1: 3.0, 2: 2.0, 3: 2.0, 4: 2.0, 5: 2.0, 6: 2.0}


def test_an_evaluation_after_a_skipped_batch_is_sent(tmp_path: Path) -> None:
    skipped = {"step": 3, "anomaly": "loss is not finite", "action": "skip"}
    folder = made(tmp_path / "run", (), [step(1), step(2), skipped, {"step": 2, "eval_loss": 3.0}])
    assert sent(folder).logged[-1] == (2, {"eval/loss": 3.0})


def test_passwords_in_texts_stay_here(tmp_path: Path) -> None:
    sample = {"number": 0, "prompt": "https://me:secret@host/", "text": "?token=abc"}
    folder = made(tmp_path / "run", (), [{"step": 1, "generated": [sample]}])
    assert sent(folder).texts == [(1, "generated/0", "https://***@host/?token=***")]


def test_of_every_so_many_steps_and_all_evaluations(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", (), [step(n) for n in range(1, 8)])
    add(folder, [{"step": 7, "eval_loss": 3.0}])
    assert steps(sent(folder, every=3)) == [3, 6, 7]


def test_lines_of_others_are_passed_over(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", (), [{"step": "first"}, {"step": [1]}, step(1)])
    assert steps(sent(folder)) == [1]


def test_what_an_earlier_version_has_kept_is_continued(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", (), [step(1), step(2), step(1, slot="chat")])
    kept = {"newest": {"step": 1}, "rollbacks": [], "further": {"chat": {"step": 1}}}
    (folder / "trackers").mkdir()
    file = folder / "trackers" / "track.json"
    file.write_text(json.dumps({"sent": kept, "state": {"id": "theirs"}}))
    tracker = sent(folder)
    assert (tracker.opened, steps(tracker)) == ([{"id": "theirs"}], [2])
    kept["newest"] = {"step": 2}
    assert json.loads(file.read_text())["sent"] == kept


def test_a_further_training_has_its_own_names_and_steps(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    add(folder, [step(1), step(2)])
    add(folder, [step(1, slot="chat"), {"step": 1, "eval_loss": 2.0, "slot": "chat"}])
    texts = [{"number": 0, "prompt": "Once ", "text": "upon"}]
    add(folder, [{"step": 1, "generated": texts, "slot": "chat"}])
    first = sent(folder, "stopped")
    add(folder, [{"step": 1, "anomaly": "loss spike", "action": "rollback", "slot": "chat"}])
    add(folder, [step(1, slot="chat", loss=9.0)])
    found = [
        (number, name, value)
        for number, numbers in [*first.logged, *sent(folder).logged]
        for name, value in numbers.items()
        if "loss" in name
    ]
    assert found == [
        (1, "loss", 3.9), (2, "loss", 3.8), (1, "chat/loss", 3.9), (1, "chat/eval/loss", 2.0),
        (1, "chat/loss", 9.0),
    ]  # fmt: skip
    assert first.texts == [(1, "chat/generated/0", "Once upon")]

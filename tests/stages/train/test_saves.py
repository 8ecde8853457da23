"""Records of saves: the cost of writing them, and by how much the steps beside were longer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.contracts.training import Progress, WrittenCheckpoint
from stages.train import saves
from stages.train.saves import Saves


class Disk:
    """Checkpoints that are on disk when a test says so, told of as by a manager."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.began = 0.0
        self.done: list[WrittenCheckpoint] = []
        self.waits = 0.0
        """Seconds that a save waits for the one before."""

    def save(self, progress: Progress) -> None:
        self.run.now += self.waits
        self.began = self.run.now

    def finish(self) -> str:
        return "here"

    def poll(self) -> list[WrittenCheckpoint]:
        found, self.done = self.done, []
        return found

    def complete(self, step: int, seconds: float) -> None:
        cost = WrittenCheckpoint(
            step=step, seconds=seconds, ended=self.began + seconds, size=1,
            user_seconds=0.0, system_seconds=0.0,
        )  # fmt: skip
        self.done.append(cost)


class Run:
    """Steps and saves at times of a test's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.step = 1000.0, 0
        self.disk = Disk(self)
        self.told: list[tuple[Any, ...]] = []
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(saves, "time", clock)
        reporter: Any = SimpleNamespace(
            saved=lambda step, stalled: self.told.append((step, "saved")),
            written=lambda one, slowed: self.told.append((one.step, slowed)),
        )
        disk: Any = self.disk
        self.saves = Saves(checkpoints=disk, reporter=reporter, newest=0)

    def take(self, *seconds: float, **more: Any) -> None:
        for one in seconds:
            self.now += one
            self.step += 1
            record = {"time": self.now, "step_seconds": one, **more}
            self.saves.poll()
            self.saves.on_step(self.step, Progress(step=self.step), record)

    def save(self) -> None:
        self.saves.save(Progress(step=self.step))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


def test_steps_beside_a_save_are_compared_with_those_before(run: Run) -> None:
    run.take(9.0, 1.0, 1.0, 1.0)
    run.save()
    run.disk.complete(4, seconds=2.5)
    run.take(1.5)
    assert run.told == [(4, "saved")]  # the step in which it ends is not known yet
    run.take(1.25)
    assert run.told == [(4, "saved"), (4, 0.75)]
    run.take(1.0)
    run.save()
    run.disk.complete(7, seconds=0.5)
    run.take(2.0)
    assert run.told[2:] == [(7, "saved"), (7, 1.0)]


def test_steps_behind_a_save_are_not_beside_it(run: Run) -> None:
    """It is noticed late: with two steps more."""
    run.take(1.0, 1.0, 1.0)
    run.save()
    run.take(3.0, 1.0, 1.0)
    run.disk.complete(3, seconds=2.0)
    run.take(1.0)
    assert run.told[1:] == [(3, 2.0)]


def test_a_save_that_waits_for_the_one_before_begins_then(run: Run) -> None:
    run.take(1.0, 1.0, 1.0)
    run.save()
    run.disk.complete(3, seconds=0.5)
    run.take(1.25)
    run.disk.waits = 5.0
    run.save()
    run.disk.complete(4, seconds=1.5)
    run.take(1.75, 1.5, 1.0)
    assert run.told == [(3, "saved"), (3, 0.25), (4, "saved"), (4, 0.75)]


def test_steps_beside_a_save_that_is_never_told_of_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks but the first, and checkpoints of plugins, need not tell."""
    monkeypatch.setattr(saves, "MOST_BESIDE", 4)
    run = Run(monkeypatch)
    run.take(1.0, 1.0, 1.0)
    run.save()
    run.take(*[1.0] * 9)
    assert len(run.saves._beside) == 4
    run.disk.complete(3, seconds=8.5)
    run.take(1.0)
    assert run.told == [(3, "saved"), (3, None)]


def test_too_few_steps_say_nothing(run: Run) -> None:
    run.take(1.0, 1.0)
    run.take(5.0, profiled=True)
    run.save()
    run.disk.complete(3, seconds=0.5)
    run.take(2.0)
    assert run.told[1:] == [(3, None)]


def test_the_next_save_and_the_end_tell_of_what_is_left(run: Run) -> None:
    run.take(1.0, 1.0, 1.0)
    run.save()
    run.take(1.5)
    run.disk.complete(3, seconds=9.0)
    run.save()
    run.disk.complete(4, seconds=1.0)
    assert run.saves.finish() == "here"
    assert run.told == [(3, "saved"), (3, 0.5), (4, "saved"), (4, 0.0)]


def test_a_second_save_of_a_step_is_not_told(run: Run) -> None:
    run.take(1.0)
    run.save()
    run.disk.complete(1, seconds=0.5)
    run.save()
    run.save()
    assert run.told == [(1, "saved"), (1, 0.0)]

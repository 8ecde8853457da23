"""Reports of a training, the record in its progress, and what saves cost."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.contracts.engine import StepReport
from pipeline.contracts.metrics import records
from pipeline.contracts.training import Progress, TrainedRun, WrittenCheckpoint
from pipeline.distributed.process_group import DistContext
from pipeline.hardware import host
from stages.batches.feed import BatchStats
from stages.train import report
from stages.train.evaluation import record_evaluation, set_metric
from stages.train.report import Reporter, Saves
from stages.train.speed import Breakdown, Cost, Profile
from stages.train.step import StepMeter, StepResult
from tests.support.runs import context

CPU = torch.device("cpu")
ENGINE: Any = SimpleNamespace(
    data_axis=SimpleNamespace(count=1), device=CPU, total=lambda values: values
)


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide models that other tests have built in this process."""
    monkeypatch.setattr(host, "_before", [])


class Steps:
    """A meter and a reporter, used as in the loop."""

    def __init__(self, folder: Path, progress: Progress, every: int = 1, cost: Any = None) -> None:
        log = logging.getLogger("pipe.test.report")
        log.setLevel(logging.INFO)
        ctx = replace(context(DistContext(device=CPU), folder), log=log)
        self.progress = progress
        self.meter = StepMeter(ENGINE, ctx.dist, progress, cost)
        self.reporter = Reporter(ctx, log_every=every, total_steps=lambda _: 9)

    def add(
        self, loss: float, stats: BatchStats | None = None, profile: Profile | None = None
    ) -> None:
        report, stats = StepReport(grad_norm=1.5, applied=True), stats or BatchStats(tokens=7)
        sums = self.meter.start_reduction(torch.tensor(loss), stats)
        done = StepResult(report=report, rates={"lr": 0.25}, stats=stats, sums=sums)
        taken = self.meter.launched_step(done, self.progress, self.progress, profile)
        record = self.meter.record(taken)
        set_metric(self.progress, "loss", record["loss"])
        self.reporter.on_step(self.progress.step, self.progress, record)


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    return list(records(tmp_path / "metrics.jsonl"))


def test_a_number_that_is_none_ends_nothing(tmp_path: Path) -> None:
    """JSON cannot represent it, and the run's record is JSON."""
    progress = Progress()
    steps = Steps(tmp_path, progress)
    seen = []
    for loss, heldout in ((2.0, 3.0), (math.nan, math.inf)):
        progress.step += 1
        steps.add(loss)
        record = record_evaluation(progress, heldout, None)
        steps.reporter.on_evaluation(progress.step, progress, record)
        seen.append(dict(progress.metrics))
    steps.reporter.anomaly(3, {"anomaly": "a spike"})
    assert seen == [{"loss": 2.0, "eval_loss": 3.0, "perplexity": math.exp(3.0)}, {}]
    told = [(line.get("loss"), line.get("eval_loss")) for line in lines(tmp_path)]
    assert told == [(2.0, None), (None, 3.0), (None, None), (None, None), (None, None)]
    assert all(line["time"] > 1.7e9 for line in lines(tmp_path))
    json.dumps(TrainedRun(checkpoint="x", progress=progress).record(), allow_nan=False)


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the clock."""
    clock = SimpleNamespace(perf_counter=lambda: 0.0, time=lambda: 100.0)
    for module in (report, sys.modules[StepMeter.__module__]):
        monkeypatch.setattr(module, "time", clock)

    def set_to(seconds: float) -> None:
        clock.perf_counter = lambda: seconds

    return set_to


def test_speeds_of_every_step_and_of_the_line(
    tmp_path: Path, at: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    progress = Progress(tokens=50, samples=4)
    cost = Cost(multiplied=6.0, attention=1.0, peak=1000.0)
    steps = Steps(tmp_path, progress, 2, cost)
    for seconds, stats in ((2.0, BatchStats(100, 400, 0.5)), (6.0, BatchStats(300, 900, 0.0))):
        progress.step += 1
        progress.tokens += 60
        progress.samples += 8
        at(seconds)
        steps.add(2.5, stats)
    first, second = lines(tmp_path)
    assert first == {
        "step": 1, "total_steps": 9, "grad_norm": 1.5, "lr": 0.25, "tokens": 110, "samples": 12,
        "applied": True,
        "loss_scale": 1.0, "time": 100.0, "loss": 2.5, "step_seconds": 2.0,
        "target_tokens_per_second": 30.0, "samples_per_second": 4.0, "tokens_per_second": 50.0,
        "tokens_per_second_per_rank": 50.0, "data_wait_share": 0.25, "mfu": 0.5,
    }  # fmt: skip
    speeds = [second[name] for name in ("step_seconds", "tokens_per_second", "mfu")]
    assert speeds == [4.0, 75.0, 0.675]
    line = (
        "step {}/9  loss 2.5000  grad_norm 1.500  lr 0.25  {} tokens/s  mfu {}%  {} s/step  eta {}"
    )
    assert caplog.messages == [
        line.format(1, 50, "50.0", "2.00", "0:16"),
        line.format(2, 75, "67.5", "4.00", "0:28"),
    ]
    progress.step += 1
    at(8.0)
    steps.add(2.5, BatchStats(100, 400, 0.5))
    assert len(caplog.messages) == 2
    progress.step += 1
    at(14.0)
    steps.add(2.5, BatchStats(300, 900, 0.0))
    assert caplog.messages[2:] == [line.format(4, 50, "46.2", "4.00", "0:20")]


def test_a_slow_step_has_a_line_whatever_the_period(
    tmp_path: Path, at: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    progress, now = Progress(), 0.0
    steps = Steps(tmp_path, progress, every=100)
    for seconds in (42.0, 12.0, 12.0, 12.0, 12.0, 30.0):
        progress.step += 1
        now += seconds
        at(now)
        steps.add(2.5)
    assert [message.split()[1] for message in caplog.messages] == ["1/9", "4/9", "6/9"]
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_step_that_is_done_is_on_disk_whenever_its_line_is_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    progress = Progress()
    steps = Steps(tmp_path, progress, every=3)
    for step in range(1, 6):
        progress.step = step
        steps.add(float(step))
        assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [
            (before, float(before)) for before in range(1, step + 1)
        ]
        assert progress.metrics["loss"] == step
        assert len(caplog.messages) == 1 + (step >= 3)
    steps.reporter.show()
    assert [message.split()[1] for message in caplog.messages] == ["1/9", "3/9", "5/9"]
    steps.reporter.show()
    assert len(caplog.messages) == 3


def test_a_profiled_step_tells_its_own_time_and_communication(
    tmp_path: Path, at: Callable[[float], None]
) -> None:
    progress = Progress()
    steps = Steps(tmp_path, progress)
    at(9.0)  # most of it is the profiler's writing
    progress.step, progress.samples = 1, 8
    steps.add(2.5, profile=Profile(seconds=2.0, shares=Breakdown(0.5, 0.25, 0.05, 0.2)))
    at(10.0)
    progress.step, progress.samples = 2, 16
    steps.add(2.5)
    first, second = lines(tmp_path)
    assert (first["step_seconds"], first["samples_per_second"]) == (2.0, 4.0)
    assert (first["profiled"], first["communication_share"]) == (True, 0.25)
    assert second["step_seconds"] == 1.0
    assert "profiled" not in second


def test_a_checkpoint_on_disk_is_a_record(tmp_path: Path) -> None:
    checkpoint = WrittenCheckpoint(
        step=3, seconds=2.0, ended=5.0, size=7000, user_seconds=0.5, system_seconds=0.25
    )
    disk: Any = SimpleNamespace(save=lambda progress: None, poll=lambda: [checkpoint])
    reporter = Steps(tmp_path, Progress()).reporter
    Saves(checkpoints=disk, reporter=reporter, newest=0).save(Progress(step=3))
    written, saved = lines(tmp_path)
    assert abs(saved.pop("time") - written.pop("time")) < 60
    assert saved == {"step": 3, "checkpoint_stall_seconds": pytest.approx(0, abs=1)}
    assert written == {
        "step": 3, "checkpoint_seconds": 2.0, "checkpoint_bytes": 7000,
        "checkpoint_user_seconds": 0.5, "checkpoint_system_seconds": 0.25,
        "checkpoint_slowed_seconds": 0.0,
    }  # fmt: skip


def test_host_memory_counts_from_where_the_model_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpipe\nVmHWM:\t 900 kB\nVmRSS:\t 500 kB\nRssShmem:\t 100 kB\n")
    monkeypatch.setattr(host, "_STATUS", status)
    assert host.peak_beyond() is None
    host.model_begins()
    status.write_text("VmHWM:\t 2000 kB\nVmRSS:\t 1500 kB\nRssShmem:\t 300 kB\n")
    host.model_begins()  # the first call counts
    assert host.peak_beyond() == (2000 - 300 - (500 - 100)) * 1024


def test_a_pause_is_no_training(tmp_path: Path, at: Callable[[float], None]) -> None:
    progress = Progress()
    steps = Steps(tmp_path, progress)
    at(50.0)
    steps.meter.restart(progress)
    progress.step = 1
    at(51.0)
    steps.add(2.0)
    assert lines(tmp_path)[0]["step_seconds"] == 1.0


SAVES: dict[str, list[Any]] = {
    "steps during a save are compared with those before": [
        9.0, 1.0, 1.0, 1.0, "save", ("on disk", 4, 2.5), 1.5,
        [(4, "saved")],  # the step in which it ends is not known yet
        1.25, [(4, "saved"), (4, 0.75)], 1.0, "save", ("on disk", 7, 0.5), 2.0,
        [(4, "saved"), (4, 0.75), (7, "saved"), (7, 1.0)],
    ],
    "it is noticed late, with two steps more": [
        1.0, 1.0, 1.0, "save", 3.0, 1.0, 1.0, ("on disk", 3, 2.0), 1.0, [(3, "saved"), (3, 2.0)],
    ],
    "a save that waits for the one before begins then": [
        1.0, 1.0, 1.0, "save", ("on disk", 3, 0.5), 1.25, ("waits", 5.0), "save",
        ("on disk", 4, 1.5), 1.75, 1.5, 1.0, [(3, "saved"), (3, 0.25), (4, "saved"), (4, 0.75)],
    ],
    "too few steps say nothing, and a profiled one is none": [
        1.0, 1.0, ("profiled", 5.0), "save", ("on disk", 3, 0.5), 2.0, [(3, "saved"), (3, None)],
    ],
    # ranks but the first, and checkpoints of plugins, need not report
    "steps during a save that is not reported are few": [
        1.0, 1.0, 1.0, "save", *[1.0] * 9, ("on disk", 3, 8.5), 1.0, [(3, "saved"), (3, None)],
    ],
    "the next save and the end report what is left": [
        1.0, 1.0, 1.0, "save", 1.5, ("on disk", 3, 9.0), "save", ("on disk", 4, 1.0), "finish",
        [(3, "saved"), (3, 0.5), (4, "saved"), (4, 0.0)],
    ],
    "a second save of a step is not reported": [
        1.0, "save", ("on disk", 1, 0.5), "save", "save", [(1, "saved"), (1, 0.0)],
    ],
}  # fmt: skip
"""Steps of so many seconds, saves, and what has been reported by then: of a save that it was made,
or by how much the steps during it were longer."""


@pytest.mark.parametrize("name", SAVES)
def test_what_saves_cost(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits, step, began, done = 1000.0, 0.0, 0, 0.0, list[WrittenCheckpoint]()
    monkeypatch.setattr(report, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(report, "MOST_DURING", 5)
    told: list[tuple[int, Any]] = []

    def save(progress: Progress) -> None:
        nonlocal now, began
        began = now = now + waits

    def poll() -> list[WrittenCheckpoint]:
        found = [*done]
        done.clear()
        return found

    disk: Any = SimpleNamespace(save=save, finish=lambda: "here", poll=poll)

    def write(step: int, record: dict[str, float]) -> None:
        slowed = record.get("checkpoint_slowed_seconds")
        told.append((step, "saved" if "checkpoint_stall_seconds" in record else slowed))

    reporter: Any = SimpleNamespace(write=write)
    saves = Saves(checkpoints=disk, reporter=reporter, newest=0)
    for event in SAVES[name]:
        match event:
            case float() | ("profiled", _):
                seconds, profiled = (event, {}) if isinstance(event, float) else (event[1], event)
                now, step = now + seconds, step + 1
                saves.poll()
                record = {"time": now, "step_seconds": seconds, "profiled": bool(profiled)}
                saves.on_step(step, Progress(step=step), record)
            case "save":
                saves.save(Progress(step=step))
            case "finish":
                assert saves.finish() == "here"
            case ("waits", seconds):
                waits = seconds
            case ("on disk", number, seconds):
                done.append(WrittenCheckpoint(
                    step=number, seconds=seconds, ended=began + seconds, size=1, user_seconds=0.0,
                    system_seconds=0.0,
                ))  # fmt: skip
            case _:
                assert told == event

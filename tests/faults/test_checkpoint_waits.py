"""A slow commit by rank 0's writer must not make the other ranks fail."""

from __future__ import annotations

import datetime
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed

from pipeline.checkpoint.manager import CheckpointManager
from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from tests.support.processes import run_ranks
from tests.support.runs import context
from tests.support.state import Setting, checkpoint_stage, make_engine

PATIENCE = 1.0
"""Seconds that a collective waits for the slowest rank."""
SLOW = 2.0
MOMENT = 1.5
"""Seconds that a save may still take when its run is closed."""
NAMES = [f"step-{step:08d}" for step in (1, 2)]


def stop_writer(checkpoints: CheckpointManager, seconds: float) -> None:
    """Stop the writer and let it continue after so many seconds."""
    pid = checkpoints.start_writer()._process.pid
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(seconds, os.kill, (pid, signal.SIGCONT)).start()


def save_slowly(dist: DistContext, folder: str, asynchronous: bool) -> list[str]:
    """Save twice with slow commits, each followed by the collectives of a training step."""
    ctx = context(dist, folder)
    impatient = torch.distributed.new_group(timeout=datetime.timedelta(seconds=PATIENCE))
    setting = Setting(wrap="ddp", checkpoint={"asynchronous": asynchronous, "keep": None})
    checkpoints = checkpoint_stage(setting).run(ctx, make_engine(ctx, setting))
    for step in (1, 2):
        if dist.is_main:
            stop_writer(checkpoints, SLOW)
        checkpoints.save(Progress(step=step))
        torch.distributed.all_reduce(torch.ones(1), group=impatient)
    checkpoints.finish()
    checkpoints.close()
    return sorted(path.name for path in Path(folder, "checkpoints").iterdir())


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_slow_commit_trips_no_collective(asynchronous: bool, tmp_path: Path) -> None:
    assert run_ranks(save_slowly, 2, str(tmp_path), asynchronous) == [NAMES, NAMES]


def close_at_once(dist: DistContext, folder: str) -> bool:
    """Close as after a failure in the step after a second save; return whether its checkpoint was
    there."""
    ctx = context(dist, folder)
    setting = Setting(wrap="ddp")
    checkpoints = checkpoint_stage(setting).run(ctx, make_engine(ctx, setting))
    checkpoints.save(Progress(step=1))
    checkpoints.finish()  # the writer has started
    if dist.is_main:
        stop_writer(checkpoints, MOMENT)
    checkpoints.save(Progress(step=2))
    checkpoints.close()
    return Path(folder, "checkpoints", NAMES[1]).is_dir()


def test_a_save_ends_well_whichever_rank_fails_after_it(tmp_path: Path) -> None:
    """The launcher ends all ranks when the first one has ended."""
    assert run_ranks(close_at_once, 2, str(tmp_path)) == [True, True]


def begun(dist: DistContext, folder: str) -> list[bool]:
    """Return whether the writer is there: before a step, behind it, and where a run that has
    failed at once was closed."""
    ctx, setting = context(dist, folder), Setting(wrap="ddp")
    stage = checkpoint_stage(setting)
    checkpoints = stage.run(ctx, make_engine(ctx, setting))
    found = [checkpoints._writer is not None]
    assert not checkpoints.poll()
    found.append(checkpoints._writer is not None)
    checkpoints.save(Progress(step=1))
    checkpoints.finish()
    checkpoints.close()
    failed = stage.run(ctx, make_engine(ctx, setting))
    failed.close()
    return [*found, failed._writer is not None]


def test_the_writer_starts_behind_the_first_step(tmp_path: Path) -> None:
    assert run_ranks(begun, 1, str(tmp_path)) == [[False, True, False]]

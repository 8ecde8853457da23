"""Copies for a save, made beside the forward and backward of the next step."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.snapshot import Snapshot
from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from stages.optimizer.adamw import AdamW
from tests.support.batches import accumulated
from tests.support.processes import run_ranks
from tests.support.runs import context
from tests.support.state import Setting, checkpoint_stage, digest, load_run, make_engine, train
from tests.support.strategies import having
from tests.support.tier import FULL
from tests.support.zero import share

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

OTHERS = ("fsdp offload", "fsdp pipeline", "fsdp tensor", "zero2 offload", "zero3 offload")


def save_and_step(dist: DistContext, folder: str, setting: Setting) -> dict[str, Any]:
    """Save, and take a step; copies in another thread begin when its backward is over, and last.
    Return the states before and after, and whether there were such copies."""
    ctx = context(dist, folder)
    engine = make_engine(ctx, setting)
    checkpoints = checkpoint_stage(setting).run(ctx, engine)
    train(engine, 0, 2)
    before, copy, backward = digest(engine, dist), Snapshot._copy, threading.Event()
    waited: list[bool] = []

    def late(snapshot: Snapshot, *piece: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            waited.append(backward.wait(60))
            time.sleep(0.002)
        copy(snapshot, *piece)

    Snapshot._copy = late  # type: ignore[method-assign]
    checkpoints.save(Progress(step=2, samples=24))
    batches, targets = share(engine, 2, 12)
    accumulated(engine, batches, targets)
    backward.set()
    engine.step(lr_scales=[0.9])
    after = digest(engine, dist)
    checkpoints.finish()
    checkpoints.close()
    engine.close()
    assert all(waited)
    return {"before": before, "after": after, "beside": bool(waited)}


def assert_saved(tmp_path: Path, setting: Setting, *, beside: bool) -> None:
    """Save beside a step, load, and compare."""
    told = run_ranks(save_and_step, 2, str(tmp_path), setting)[0]
    assert told["beside"] is beside
    assert told["before"] != told["after"]
    assert run_ranks(load_run, 2, str(tmp_path), setting)[0]["state"] == told["before"]


@pytest.mark.parametrize("wrap", [*having("basic"), *(OTHERS if FULL else ())])
def test_a_step_changes_nothing_before_it_is_copied(wrap: str, tmp_path: Path) -> None:
    assert_saved(tmp_path, Setting(wrap=wrap), beside=True)


def test_moments_in_few_bits_are_copied_first(tmp_path: Path) -> None:
    """They are unpacked for it, one parameter's at a time."""
    optimizer = AdamW(lr=1e-3, moments="8bit", kernel="single")
    assert_saved(tmp_path, Setting(wrap="fsdp full", optimizer=optimizer), beside=False)


def test_without_asynchronous_saves_nothing_is_beside(tmp_path: Path) -> None:
    setting = Setting(wrap="ddp", checkpoint={"asynchronous": False})
    assert_saved(tmp_path, setting, beside=False)

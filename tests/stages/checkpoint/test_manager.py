"""Saves of any engine: copies are made during the next step's forward and backward, and through a
staging buffer that does not grow with the state."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoint.file_layout import plan_staging
from pipeline.checkpoint.location import open_checkpoint
from pipeline.checkpoint.manager import CheckpointManager
from pipeline.checkpoint.manifest import BLOCK
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.checkpoint.snapshot import Snapshot
from pipeline.checkpoint.write_plan import DTYPES, WritePlan
from pipeline.contracts.engine import Engine
from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from pipeline.errors import CheckpointError
from pipeline.utils.files import PAGE
from stages.optimizer.adamw import AdamW
from tests.support.batches import accumulated
from tests.support.processes import in_turn, run_ranks
from tests.support.runs import context
from tests.support.state import (
    Setting,
    checkpoint_stage,
    digest,
    hashed,
    load_run,
    make_engine,
    train,
)
from tests.support.strategies import having
from tests.support.tier import FULL
from tests.support.zero import share

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

OTHERS = ("fsdp offload", "fsdp pipeline", "fsdp tensor", "zero2 offload", "zero3 offload")
SMALL = 2 * BLOCK
"""Bytes of the staging buffer, which the tiny model's state fills many times."""


def opened(dist: DistContext, folder: str, setting: Setting) -> tuple[Engine, CheckpointManager]:
    ctx = context(dist, folder)
    engine = make_engine(ctx, setting)
    return engine, checkpoint_stage(setting).run(ctx, engine)


def save_and_step(dist: DistContext, folder: str, setting: Setting) -> dict[str, Any]:
    """Save, and take a step; copies in another thread begin when its backward is over, and last.
    Return the states before and after, and whether there were such copies."""
    engine, checkpoints = opened(dist, folder, setting)
    train(engine, 0, 2)
    before, copy, backward = digest(engine, dist), Snapshot._copy, threading.Event()
    waited: list[bool] = []

    def late(snapshot: Snapshot, *piece: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            waited.append(backward.wait(60))
            time.sleep(0.002)
        copy(snapshot, *piece)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Snapshot, "_copy", late)
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


def test_a_step_changes_nothing_before_it_is_copied(tmp_path: Path) -> None:
    """Moments in few bits are copied first, as they are unpacked for it, one parameter's at a time;
    and nothing is copied later when saves are not asynchronous."""
    cases = {wrap: Setting(wrap=wrap) for wrap in (*having("basic"), *(OTHERS if FULL else ()))}
    packed = {f"8bit {wrap}": wrap for wrap in ("fsdp full", "zero2")}
    few_bits = AdamW(lr=1e-3, moments="8bit", kernel="single")
    cases |= {name: Setting(wrap=wrap, optimizer=few_bits) for name, wrap in packed.items()}
    cases["waiting"] = Setting(wrap="ddp", checkpoint={"asynchronous": False})
    places = [(str(tmp_path / name), setting) for name, setting in cases.items()]
    told = run_ranks(in_turn, 2, [(save_and_step, *place) for place in places])[0]
    loaded = run_ranks(in_turn, 2, [(load_run, *place) for place in places])[0]
    for name, saved, found in zip(cases, told, loaded, strict=True):
        assert saved["beside"] == (name not in {*packed, "waiting"}), name
        assert saved["before"] != saved["after"], name
        assert found["state"] == saved["before"], name


def small_staging(layout: Any, streamed: Any) -> Any:
    return plan_staging(layout, streamed, SMALL)


def save(
    dist: DistContext, folder: str, setting: Setting, on_device: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the saved and the expected state, the rank's share, and the memory used. Kinds in
    `on_device` are treated as if they were on the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.checkpoint.manager.plan_staging", small_staging)
        if on_device:
            patch.setattr(
                WritePlan, "__post_init__", lambda plan: moved(plan, on_device), raising=False
            )
        engine, kept = opened(dist, folder, setting)
        for step in (1, 2):
            train(engine, step - 1, step)
            kept.save(Progress(step=step))
        expected = digest(engine, dist)
        train(engine, 2, 3)  # while it is still being written
        place = kept.finish()
        size, rounds = kept.staging.size, len(kept.staging.rounds)
        share = kept.plan.rank_files.files[0][1]
        kept.close()
    reader = CheckpointReader(*open_checkpoint(place))
    found = {
        key: hashed(torch.frombuffer(bytearray(reader.read_bytes(key)), dtype=DTYPES[entry.dtype]))
        for key, entry in reader.tensors.items()
        if not key.startswith("random/")
    }
    reader.close()
    wanted = {key: text for key, text in expected.items() if key in found}
    return {"same": found == wanted, "size": size, "share": share, "rounds": rounds}


def moved(plan: WritePlan, kinds: tuple[str, ...]) -> None:
    object.__setattr__(plan, "on_host", {key for key in plan.on_host if not key.startswith(kinds)})


def save_each(dist: DistContext, folder: str) -> dict[str, dict[str, Any]]:
    return {
        "ddp": save(dist, f"{folder}/1", Setting(wrap="ddp")),
        "bf16": save(dist, f"{folder}/2", Setting(wrap="fsdp full", master="bf16", compute="bf16")),
        "full": save(dist, f"{folder}/3", Setting(wrap="fsdp full", full=True)),
        "waiting": save(
            dist, f"{folder}/4", Setting(wrap="ddp", checkpoint={"asynchronous": False}),
            ("weight", "exp"),
        ),
        "device": save(dist, f"{folder}/5", Setting(wrap="ddp"), ("exp_avg/",)),
    }  # fmt: skip


def test_memory_and_content(tmp_path: Path) -> None:
    # headers, the states of random generators, and what lies between pieces
    fixed = 3 * PAGE + 3 * 5200 + 4 * PAGE
    for found in run_ranks(save_each, 2, str(tmp_path)):
        for name, case in found.items():
            assert case["same"], name
            assert case["rounds"] > 2, name
            third = case["share"] // 3 if name == "device" else 0
            assert case["size"] <= third + fixed + SMALL, name


def save_on_a_full_disk(dist: DistContext, folder: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.checkpoint.manager.plan_staging", small_staging)
        engine, kept = opened(dist, folder, Setting(wrap="ddp"))
        checkpoints = Path(folder, "checkpoints")
        checkpoints.rmdir()
        checkpoints.write_text("a file is in the way")
        kept.save(Progress(step=1))
        with pytest.raises(CheckpointError) as told:
            train(engine, 0, 1)  # its update waits for the copies
        kept.close()
    return str(told.value)


def fail_behind_a_save(dist: DistContext, folder: str) -> bool:
    def lost(dist: DistContext) -> None:
        raise ConnectionError

    engine, kept = opened(dist, folder, Setting(wrap="ddp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistContext, "barrier", lost)
        kept.save(Progress(step=1))
        with pytest.raises(ConnectionError):
            train(engine, 0, 1)
        kept.close()
    return Path(folder, "checkpoints/step-00000001/manifest.json").is_file()


def fail_each(dist: DistContext, folder: str) -> tuple[str, bool]:
    return save_on_a_full_disk(dist, f"{folder}/1"), fail_behind_a_save(dist, f"{folder}/2")


def test_failures_of_the_writer_and_of_other_ranks(tmp_path: Path) -> None:
    ((said, saved),) = run_ranks(fail_each, 1, str(tmp_path))
    assert said.startswith("step-00000001 could not be saved: ")
    assert saved, "what was handed over gets a moment to end well"

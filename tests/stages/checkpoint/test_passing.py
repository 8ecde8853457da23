"""State in host memory is saved through a staging buffer that does not grow with it, under any
engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoint import block_sums
from pipeline.checkpoint.manager import CheckpointManager
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.checkpoint.staging import plan_staging
from pipeline.checkpoint.store import locate
from pipeline.checkpoint.write_plan import DTYPES, WritePlan
from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from pipeline.errors import CheckpointError
from pipeline.utils.files import PAGE
from tests.support.processes import run_ranks
from tests.support.runs import context
from tests.support.state import Setting, checkpoint_stage, digest, hashed, make_engine, train

SMALL = 2 * block_sums.BLOCK
"""Bytes of the staging buffer, which the tiny model's state fills many times."""


def save(
    dist: DistContext, folder: str, setting: Setting, on_device: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the saved and the expected state, the rank's share, and the memory used. Kinds in
    `on_device` are treated as if they were on the device."""
    with pytest.MonkeyPatch.context() as patch:
        small = lambda layout, passing: plan_staging(layout, passing, SMALL)  # noqa: E731
        patch.setattr("pipeline.checkpoint.manager.plan_staging", small)
        if on_device:
            patch.setattr(
                WritePlan, "__post_init__", lambda plan: moved(plan, on_device), raising=False
            )
        ctx = context(dist, folder)
        engine = make_engine(ctx, setting)
        kept: CheckpointManager = checkpoint_stage(setting).run(ctx, engine)
        for step in (1, 2):
            train(engine, step - 1, step)
            kept.save(Progress(step=step))
        expected = digest(engine, dist)
        train(engine, 2, 3)  # while it is still being written
        place = kept.finish()
        size, rounds = kept.snapshot.staging.size, len(kept.snapshot.staging.rounds)
        share = kept.plan.layout.files[0].size
        kept.close()
    reader = CheckpointReader(*locate(place))
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
        small = lambda layout, passing: plan_staging(layout, passing, SMALL)  # noqa: E731
        patch.setattr("pipeline.checkpoint.manager.plan_staging", small)
        ctx = context(dist, folder)
        engine = make_engine(ctx, Setting(wrap="ddp"))
        kept: CheckpointManager = checkpoint_stage(Setting(wrap="ddp")).run(ctx, engine)
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

    ctx = context(dist, folder)
    engine = make_engine(ctx, Setting(wrap="ddp"))
    kept = checkpoint_stage(Setting(wrap="ddp")).run(ctx, engine)
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

"""checkpoint.dcp: an interrupted training goes on exactly as an undisturbed one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.artifacts import Progress
from pipeline.dist import Dist
from pipeline.errors import CheckpointError
from pipeline.metrics import records
from stages.checkpoint.dcp import DcpCheckpoint
from stages.checkpoint.steps import step_folders
from stages.consolidate.dcp import ConsolidateDcp
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from stages.train.causal_lm import TrainCausalLm
from stages.wrap.ddp import Ddp
from stages.wrap.fsdp import Fsdp
from tests.parity.body import tiny_source
from tests.support.processes import run_ranks
from tests.support.runs import context, toy_data

WRAPS = {
    "ddp": Ddp(),
    "fsdp": Fsdp(),
    "hybrid": Fsdp(sharding="hybrid_shard", shard_size=2),
    "offload": Fsdp(cpu_offload=True),
}


class Stopped(Exception):
    """Stands for a crash right after a checkpoint."""


def train_and_stop(
    dist: Dist, folder: str, wrap: str, compute: Any, stop_after: int | None
) -> list[dict[str, Any]]:
    ctx = context(dist, folder)
    source = tiny_source(ctx, attention_dropout=0.1)
    plan = AdamW(lr=1e-3, warmup_steps=2).run(ctx)
    engine = WRAPS[wrap].run(ctx, source, PrecisionPolicy(compute=compute).run(ctx), plan)
    checkpoints = DcpCheckpoint(every=2, keep=2).run(ctx, engine)
    if stop_after is not None:
        save = checkpoints.save

        def save_then_stop(progress: Progress) -> Path:
            folder = save(progress)
            if progress.step == stop_after:
                raise Stopped
            return folder

        checkpoints.save = save_then_stop  # type: ignore[method-assign]
    loop = TrainCausalLm(global_batch_size=6, steps=6, micro_batch_size=2, log_every=1)
    try:
        trained = loop.run(ctx, engine, toy_data(), plan, checkpoints)
    except Stopped:
        return []
    if dist.is_main:
        save_file(dict(ConsolidateDcp().run(ctx, trained)), f"{folder}/final.safetensors")
    return list(records(ctx.run_dir / "metrics.jsonl"))


@pytest.mark.parametrize(
    ("wrap", "compute", "ranks"),
    [
        ("ddp", "fp32", 2),
        ("ddp", "fp16", 2),
        ("fsdp", "fp32", 3),
        ("fsdp", "bf16", 2),
        ("hybrid", "fp32", 4),
        ("offload", "fp32", 2),
    ],
)
def test_resumed_equals_undisturbed_bit_for_bit(
    wrap: str, compute: str, ranks: int, tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    through = run_ranks(train_and_stop, ranks, str(whole), wrap, compute, None)[0]
    run_ranks(train_and_stop, ranks, str(parts), wrap, compute, 4)
    resumed = run_ranks(train_and_stop, ranks, str(parts), wrap, compute, None)[0]
    numbers = ("step", "loss", "grad_norm", "tokens", "samples", "eval_loss", "loss_scale")
    assert [[r.get(n) for n in numbers] for r in resumed] == [
        [r.get(n) for n in numbers] for r in through
    ]
    left, right = load_file(whole / "final.safetensors"), load_file(parts / "final.safetensors")
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    names = [folder.name for folder in step_folders(parts / "checkpoints")]
    assert names == ["step-00000004", "step-00000006"]


def resume_with(dist: Dist, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Go on under another recipe: the groups that ran, or why it was refused."""
    ctx = context(dist, folder, settings.get("seed", 7))
    plan = AdamW(lr=5e-4, weight_decay=0.5, kernel="single").run(ctx)
    source = tiny_source(ctx, attention_dropout=0.1)
    engine = Ddp().run(ctx, source, PrecisionPolicy(compute="fp32").run(ctx), plan)
    loop = TrainCausalLm(global_batch_size=6, steps=6, micro_batch_size=2)
    try:
        loop.run(ctx, engine, toy_data(settings.get("size", 40)), plan, checkpoints(ctx, engine))
    except CheckpointError as error:
        return {"refused": str(error)}
    moment = next(iter(engine.optimizer.state.values()))
    groups = [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups]
    return {"groups": groups, "updates": int(moment["step"])}


def checkpoints(ctx: Any, engine: Any) -> Any:
    return DcpCheckpoint(every=2, keep=2).run(ctx, engine)


def test_another_recipes_rates_hold_after_resuming(tmp_path: Path) -> None:
    run_ranks(train_and_stop, 2, str(tmp_path), "ddp", "fp32", 4)
    resumed = run_ranks(resume_with, 2, str(tmp_path), {})[0]
    assert resumed["updates"] == 6
    matrices, vectors = resumed["groups"]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.5, 0.0)
    assert matrices["initial_lr"] == 5e-4
    assert matrices["lr"] == 0.0  # the last step of a cosine
    assert not matrices["fused"]


@pytest.mark.parametrize(
    ("settings", "word"), [({"seed": 8}, "another seed"), ({"size": 41}, "another data")]
)
def test_a_position_in_another_training_is_refused(
    settings: Any, word: str, tmp_path: Path
) -> None:
    run_ranks(train_and_stop, 2, str(tmp_path), "ddp", "fp32", 4)
    assert word in run_ranks(resume_with, 2, str(tmp_path), settings)[0]["refused"]


def restore_only(dist: Dist, folder: str) -> str:
    ctx = context(dist, folder)
    plan = AdamW().run(ctx)
    engine = Ddp().run(ctx, tiny_source(ctx), PrecisionPolicy(compute="fp32").run(ctx), plan)
    try:
        DcpCheckpoint().run(ctx, engine).restore()
    except CheckpointError as error:
        return str(error)
    return "restored"


def test_another_world_size_and_a_damaged_folder_are_refused(tmp_path: Path) -> None:
    run_ranks(train_and_stop, 2, str(tmp_path), "ddp", "fp32", 4)
    refused = run_ranks(restore_only, 1, str(tmp_path))[0]
    assert "written by 2 processes, this run has 1" in refused
    assert "launch.procs=2" in refused
    record = tmp_path / "checkpoints/step-00000004/progress.json"
    other = json.loads(record.read_text())
    record.write_text(json.dumps({**other, "world_size": 1, "progress": {"stride": 3}}))
    assert "another version" in run_ranks(restore_only, 1, str(tmp_path))[0]
    record.write_text("{")
    assert "cannot be read" in run_ranks(restore_only, 1, str(tmp_path))[0]


def test_a_partial_folder_is_never_taken_for_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "step-00000004.partial").mkdir()
    (tmp_path / "step-00000002").mkdir()
    assert [folder.name for folder in step_folders(tmp_path)] == ["step-00000002"]

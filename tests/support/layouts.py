"""Programs of each rank in the tests that carry a training from one layout of ranks to another."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from stages.average.ema import EmaAverage
from stages.checkpoint.sharded import ShardedCheckpoint
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from tests.parity.body import tiny_source
from tests.support.moe import MOE
from tests.support.runs import context
from tests.support.state import train
from tests.support.strategies import Strategy

FIRST, LAST = 2, 4
ADAMW = AdamW(lr=1e-3, weight_decay=0.1, max_grad_norm=0.5)
MODEL = {**MOE["qwen3_moe"], "num_experts": 4}
FROZEN = ("model.embed_tokens.*", "model.layers.0.mlp.experts.*", "*q_proj.weight")
LORA = {"rank": 4, "alpha": 8.0, "targets": ("q_proj", "o_proj")}


class Layout(NamedTuple):
    """A strategy and its number of ranks."""

    ranks: int
    use: str
    fields: dict[str, Any]


def fsdp(ranks: int, **axes: Any) -> Layout:
    """Return wrap.fsdp with axes of these sizes."""
    fields = {f"{name}_parallel": {"size": size} for name, size in axes.items()}
    return Layout(ranks, "wrap.fsdp", fields)


LAYOUTS = {
    "ddp": Layout(2, "wrap.ddp", {}),
    "zero3": Layout(2, "wrap.zero", {"stage": 3, "param_persistence_threshold": 100}),
    "context": Layout(2, "wrap.ddp", {"context_parallel": {"size": 2}}),
    "fsdp": fsdp(2),
    "tensor": fsdp(2, tensor=2),
    "tensor x fsdp": fsdp(4, tensor=2),
    "tensor, zero3": Layout(
        2,
        "wrap.zero",
        {"stage": 3, "param_persistence_threshold": 100, "tensor_parallel": {"size": 2}},
    ),
    "tensor x zero2": Layout(4, "wrap.zero", {"stage": 2, "tensor_parallel": {"size": 2}}),
    "pipeline": fsdp(2, pipeline=2),
    "pipeline x tensor": fsdp(4, pipeline=2, tensor=2),
    "expert": fsdp(2, expert=2),
    "expert x fsdp": fsdp(4, expert=2),
}


MORE_LAYOUTS = {
    "one": Layout(1, "wrap.ddp", {}),
    "fsdp on 3": fsdp(3),
    "hybrid": Layout(4, "wrap.fsdp", {"sharding": "hybrid_shard", "shard_size": 2}),
}
ALL_LAYOUTS = LAYOUTS | MORE_LAYOUTS


def _engine(ctx: Any, name: str, *, change: str, optimizer: Any) -> tuple[Any, Any, Any]:
    """Return the engine, the one that it averages, and the stage that saves it."""
    layout = ALL_LAYOUTS[name]
    source = tiny_source(
        ctx, LORA if change == "lora" else None,
        {"frozen": FROZEN} if change == "frozen" else None, **MODEL,
    )  # fmt: skip
    precision = PrecisionPolicy(compute="fp32").run(ctx)
    wrap = Strategy(use=layout.use, fields=layout.fields).stage()
    inner = wrap.run(ctx, source, precision, optimizer.run(ctx))
    engine = EmaAverage(decay=0.75).run(ctx, inner)
    held = source if change == "frozen" else None  # else checkpoints hold all
    return engine, inner, ShardedCheckpoint(keep=None).run(ctx, engine, held)


def undisturbed(
    dist: DistContext, folder: str, name: str, change: str, optimizer: Any = ADAMW
) -> list[float]:
    """Train, saving half way and at the end; return the losses of the second half."""
    ctx = context(dist, folder)
    engine, inner, checkpoints = _engine(ctx, name, change=change, optimizer=optimizer)
    losses, parts = [], len(optimizer.update_rules())
    for first, last in ((0, FIRST), (FIRST, LAST)):
        losses = train(engine, first, last, parts=parts)
        checkpoints.save(Progress(step=last, samples=12 * last))
    checkpoints.finish()
    checkpoints.close()
    inner.close()
    return losses


def continued(
    dist: DistContext,
    root: str,
    name: str,
    sources: list[str],
    change: str,
    optimizer: Any = ADAMW,
) -> list[list[float]]:
    """Go on from the middle of the training under each of the other layouts; return the losses."""
    return [_continue(dist, Path(root), name, source, change, optimizer) for source in sources]


def _continue(
    dist: DistContext, root: Path, name: str, source: str, change: str, optimizer: Any
) -> list[float]:
    folder = root / f"{source} to {name}"
    middle = f"step-{FIRST:08d}"
    if dist.is_main:
        shutil.copytree(root / source / "checkpoints" / middle, folder / "checkpoints" / middle)
    dist.barrier()
    ctx = context(dist, folder)
    engine, inner, checkpoints = _engine(ctx, name, change=change, optimizer=optimizer)
    progress = checkpoints.restore(lambda progress: None)
    assert progress is not None
    losses = train(engine, progress.step, LAST, parts=len(optimizer.update_rules()))
    checkpoints.save(Progress(step=LAST, samples=12 * LAST))
    checkpoints.finish()
    checkpoints.close()
    inner.close()
    return losses

"""A resume on a GPU: the same bits as without a stop, with dropout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.contracts.engine import Engine
from pipeline.contracts.stage import Context
from pipeline.contracts.training import Checkpoints, Progress
from pipeline.distributed.process_group import DistContext
from stages.checkpoint.sharded import ShardedCheckpoint
from tests.gpu.training import VOCABULARY, Case, engine_of, made_steps, started, train

GPT2 = {
    "model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4,
    "n_positions": 64,
}  # fmt: skip
"""Drops a tenth of its activations."""
HALF = 3


def opened(ctx: Context, case: Case) -> tuple[Engine, Any]:
    """Return an engine and its checkpoints."""
    engine = engine_of(ctx, case)
    return engine, ShardedCheckpoint().run(ctx, engine)


def closed(engine: Engine, checkpoints: Any) -> None:
    checkpoints.close()
    engine.close()


def bits(engine: Engine) -> dict[str, bytes]:
    """Return the bytes of all weights and moments."""
    return {
        f"{kind}/{fragment.name}": values.cpu().view(torch.uint8).numpy().tobytes()
        for fragment in engine.fragments()
        for kind, values in fragment.state.items()
    }


def restored(checkpoints: Checkpoints, *, seed: int | None = None) -> None:
    """Go back to the checkpoint, whose generators are others than before; `seed` starts these
    anew behind it."""
    torch.manual_seed(99)
    progress = checkpoints.restore(lambda progress: None)
    assert progress is not None
    assert progress.step == HALF
    if seed is not None:
        torch.manual_seed(seed)


def assert_resumes(dist: DistContext, folder: Path, case: Case) -> None:
    """Train on behind a save, and in another engine from what was saved."""
    ctx, steps = started(dist, folder), made_steps(dist.device, steps=2 * HALF)
    engine, checkpoints = opened(ctx, case)
    train(engine, steps[:HALF])
    checkpoints.save(Progress(step=HALF))
    checkpoints.finish()
    expected, state = train(engine, steps[HALF:], first=HALF), bits(engine)
    closed(engine, checkpoints)
    engine, checkpoints = opened(ctx, case)
    assert bits(engine) != state
    restored(checkpoints)
    assert train(engine, steps[HALF:], first=HALF) == expected
    assert bits(engine) == state
    restored(checkpoints, seed=5)
    assert train(engine, steps[HALF:], first=HALF).losses != expected.losses  # drops others
    closed(engine, checkpoints)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("wrap", ["wrap.ddp", "wrap.fsdp"])
def test_resume(wrap: str, compute: str, gpu: DistContext, tmp_path: Path) -> None:
    # Other implementations of attention add gradients up in any order.
    case = Case(wrap=wrap, compute=compute, model=GPT2, hf={"attention": "eager"})
    assert_resumes(gpu, tmp_path, case)

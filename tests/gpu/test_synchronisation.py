"""Steps in which the host never waits for the GPU, but for the gradient norm at their end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipeline.distributed.process_group import DistContext
from stages.objectives.cross_entropy import CrossEntropy
from tests.gpu.training import Case, engine_of, lr_scale, made_steps, started, targets_of
from tests.support.batches import accumulated

WARM_UP = 2


@contextlib.contextmanager
def waits_raise() -> Iterator[None]:
    """Have torch raise where the host waits for the GPU in the body; it does not see waits for an
    event, which is how the norm arrives (`HostCopy`)."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(1, device="cuda").item()
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("chunk", [None, 37])
@pytest.mark.parametrize("wrap", ["wrap.ddp", "wrap.fsdp"])
def test_a_step_never_waits(
    wrap: str, chunk: int | None, compute: str, gpu: DistContext, tmp_path: Path
) -> None:
    engine = engine_of(started(gpu, tmp_path), Case(wrap=wrap, compute=compute))
    objective, steps = CrossEntropy(chunk), made_steps(gpu.device)
    scales = [1 / targets_of(batches) for batches in steps]
    losses, norms = [], []
    for step, batches in enumerate(steps):
        with waits_raise() if step >= WARM_UP else contextlib.nullcontext():
            losses.append(accumulated(engine, batches, 1 / scales[step], objective))
            norms.append(engine.step(lr_scales=[lr_scale(step)]).grad_norm)
    engine.close()
    assert float(losses[-1]) < float(losses[0])
    assert all(float(norm) > 0 for norm in norms)

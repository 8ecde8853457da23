"""Training steps without data, for planning."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.engine import Engine
from pipeline.planning.planner import Extent, PhaseListener
from pipeline.planning.shapes import SampleShape
from pipeline.planning.timeline import BACKWARD, FORWARD, RESUME, SAVE, UPDATE
from stages.model.masks_compat import masks_of_values
from stages.train.batches import MicroBatch
from stages.train.loss import SummedLoss

if TYPE_CHECKING:
    from stages.train.causal_lm import TrainCausalLm

MICROBATCHES = 3
"""Further ones are like the last but one."""


def train(
    config: TrainCausalLm,
    engine: Engine,
    samples: SampleShape,
    extent: Extent,
    listener: PhaseListener,
) -> None:
    """Two steps as `train_step` makes them, or one micro-batch; tells the phases."""
    most = -(-config.global_batch_size // engine.shard.count)
    size = extent.samples or min(config.microbatch_size(engine.shard.count), most)
    count = min(-(-most // size), MICROBATCHES)
    loss = SummedLoss(engine.model, config.loss_chunk_size)
    batch = _batch(size, samples, engine.device)
    targets = config.global_batch_size * samples.length
    with masks_of_values(packed=samples.packed):
        # The first step makes the optimizer's state.
        for microbatches in (1,) if extent.samples else (1, count):
            _step(engine, loss, batch, microbatches, targets, listener)
    for phase in (SAVE, RESUME):  # which hold what there is between two steps
        listener.phase(phase)


def _step(
    engine: Engine,
    loss: SummedLoss,
    batch: MicroBatch,
    count: int,
    targets: int,
    listener: PhaseListener,
) -> None:
    loss_sum = torch.zeros((), device=engine.device)
    for number in range(count):
        listener.phase(FORWARD)
        with engine.microbatch(last=number == count - 1):
            summed = loss(batch)
            listener.phase(BACKWARD)
            engine.backward(summed * (engine.shard.count / targets))
        loss_sum += summed.detach()
        del summed
    listener.phase(UPDATE)
    engine.step(lr_scale=1.0, admit=lambda norm: True)


def _batch(size: int, samples: SampleShape, device: torch.device) -> MicroBatch:
    """Tokens and targets; in packed samples, documents of half the length."""
    ids = torch.zeros(size, samples.length, dtype=torch.int64, device=device)
    positions: Tensor | None = None
    if samples.packed:
        half = torch.arange(samples.length, device=device) % (samples.length // 2)
        positions = half.expand(size, -1).contiguous()
    return MicroBatch(input_ids=ids, labels=ids.clone(), positions=positions)

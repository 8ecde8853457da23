"""Padding of micro-batches to the lengths that strategies ask for."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pipeline import NO_TARGET, MicroBatch


def padded(batch: MicroBatch, multiple: int) -> MicroBatch:
    """The micro-batch with its length padded on the right to a multiple. Padding has no targets;
    beside packed documents it is a document of its own."""
    samples, length = batch.input_ids.shape
    extra = -length % multiple
    if not extra:
        return batch
    positions = batch.positions
    if positions is not None:
        more = torch.arange(extra, device=positions.device).expand(samples, -1)
        positions = torch.cat([positions, more], dim=1)
    real = torch.ones_like(batch.labels, dtype=torch.bool) if batch.real is None else batch.real
    return MicroBatch(
        input_ids=F.pad(batch.input_ids, (0, extra)),
        labels=F.pad(batch.labels, (0, extra), value=NO_TARGET),
        positions=positions,
        real=F.pad(real, (0, extra), value=False),
    )

"""Micro-batches of one shape, as many as a schedule takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from pipeline import NO_TARGET, MicroBatch
from stages.wrap.padding import pad


def least_microbatches(schedule: str, ranks: int, count: int) -> int:
    """The number of micro-batches from `count` on that a schedule of torch can run."""
    if schedule == "1F1B":
        return max(count, ranks)
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):  # rounds of equal numbers
        while count % max(1, count // ranks):
            count += 1
    return count


def equal_shapes(batches: Sequence[MicroBatch], least: int) -> list[MicroBatch]:
    """The micro-batches, padded to the largest shape among them, and empty ones up to `least`.

    Padding has no targets, and is a document of its own beside packed ones.
    """
    samples = max(batch.input_ids.shape[0] for batch in batches)
    length = max(batch.input_ids.shape[1] for batch in batches)
    packed = any(batch.positions is not None for batch in batches)
    even = [pad(batch, samples, length, packed=packed) for batch in batches]
    nothing = torch.full_like(even[0].labels, NO_TARGET)
    empty = replace(even[0], labels=nothing, real=None)
    return even + [empty] * (least - len(even))

"""How a global batch is cut into micro-batches, so that any cut trains on the same samples.

A step takes the next `global_batch_size` samples of the global order. Each rank takes a contiguous
share of them, in rank order, and cuts it into micro-batches; concatenating all shares in rank order
gives the global batch back. Where samples do not divide evenly, some micro-batches are short or
empty: the loss is normalised over the whole step, so that changes no number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.contracts.data import NO_TARGET, Sample
from pipeline.contracts.engine import DataAxis


def rank_share(count: int, shard: DataAxis) -> tuple[int, int]:
    """Start and end of this rank's share of `count` samples; shares differ by at most one."""
    base, extra = divmod(count, shard.count)
    start = shard.index * base + min(shard.index, extra)
    return start, start + base + (shard.index < extra)


def microbatches(count: int, shard: DataAxis, micro_batch_size: int) -> list[tuple[int, int]]:
    """Ranges of this rank's micro-batches within a batch of `count` samples.

    Every rank gets the same number of ranges, as collectives demand; ranges may be empty.
    """
    start, end = rank_share(count, shard)
    largest = -(-count // shard.count)
    pieces = -(-largest // micro_batch_size)
    edges = [min(start + piece * micro_batch_size, end) for piece in range(pieces + 1)]
    return [(edges[piece], edges[piece + 1]) for piece in range(pieces)]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Token ids, labels and, if any sample is packed, positions of one forward pass; int64, shape
    (samples, length)."""

    input_ids: Tensor
    labels: Tensor
    positions: Tensor | None = None


def collate(samples: Sequence[Sample], pad_id: int, device: torch.device) -> MicroBatch:
    """Stack samples, padding short ones on the right with `pad_id` and NO_TARGET.

    Padding on the right needs no attention mask in a causal model: no real token attends to it. No
    sample at all becomes one padding token without target, so that the rank still takes part.
    Beside packed samples, padding is a document of its own.
    """
    length = max((len(sample.input_ids) for sample in samples), default=1)
    shape = (max(len(samples), 1), length)
    input_ids: np.ndarray[Any, Any] = np.full(shape, pad_id, dtype=np.int64)
    labels: np.ndarray[Any, Any] = np.full(shape, NO_TARGET, dtype=np.int64)
    for row, sample in enumerate(samples):
        input_ids[row, : len(sample.input_ids)] = sample.input_ids
        labels[row, : len(sample.labels)] = sample.labels
    return MicroBatch(
        input_ids=_to(input_ids, device),
        labels=_to(labels, device),
        positions=_positions(samples, length, device),
    )


def _positions(samples: Sequence[Sample], length: int, device: torch.device) -> Tensor | None:
    if all(sample.positions is None for sample in samples):
        return None
    rows = [_padded(sample, length) for sample in samples]
    return _to(np.stack(rows), device)


def _padded(sample: Sample, length: int) -> np.ndarray[Any, Any]:
    own = np.arange(len(sample.input_ids)) if sample.positions is None else sample.positions
    return np.concatenate([own, np.arange(length - len(own))]).astype(np.int64)


def _to(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)

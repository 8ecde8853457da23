"""What each step trains on, as a pure function of the position in the global order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from pipeline.artifacts import Data
from pipeline.engine import DataShard
from pipeline.errors import StageError
from pipeline.order import SampleOrder
from stages.train.batches import MicroBatch, collate, microbatches
from stages.train.causal_lm import TrainCausalLm

if TYPE_CHECKING:
    from numpy.typing import NDArray

STRETCH = 1024
"""Positions of the order that are computed at once, at most an epoch."""


class Feed:
    """The training samples in their global order, cut for this rank."""

    def __init__(
        self, config: TrainCausalLm, data: Data, seed: int, shard: DataShard, device: torch.device
    ) -> None:
        self._data = data
        self._shard = shard
        self._device = device
        self._batch = config.global_batch_size
        self._micro = config.microbatch_size(shard.count)
        self._order = OrderStretch(SampleOrder(seed, len(data.train), shuffle=config.shuffle))
        self._end = None if config.epochs is None else round(config.epochs * len(data.train))
        if self._end == 0:
            raise StageError(
                f"{config.epochs} epochs of {len(data.train)} samples are less than one sample"
            )
        self.total_steps = config.steps or -(-(self._end or 0) // self._batch)

    def count(self, position: int) -> int:
        """Samples of the step that starts at `position`; fewer than a batch only at the very
        end."""
        return self._batch if self._end is None else min(self._batch, self._end - position)

    def targets(self, position: int) -> int:
        """Target tokens of the whole step on all ranks, known without any communication."""
        return sum(
            self._data.train.targets(int(index))
            for index in self._order.indices(position, self.count(position))
        )

    def microbatches(self, position: int) -> Iterator[tuple[MicroBatch, bool]]:
        """This rank's micro-batches of the step at `position`, each with whether it is the last."""
        count = self.count(position)
        indices = self._order.indices(position, count)
        ranges = microbatches(count, self._shard, self._micro)
        for place, (start, end) in enumerate(ranges, 1):
            samples = [self._data.train[int(index)] for index in indices[start:end]]
            batch = collate(samples, self._data.pad_id, self._device)
            yield batch, place == len(ranges)


class OrderStretch:
    """An order's indices, computed a stretch at a time.

    Most of a short computation is numpy's cost per call, and every step asks twice for the same.
    """

    def __init__(self, order: SampleOrder) -> None:
        self._order = order
        self._start = 0
        self._known: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def indices(self, start: int, count: int) -> NDArray[np.int64]:
        """The samples at positions start ... start + count - 1; shape (count,)."""
        skip = start - self._start
        if skip < 0 or skip + count > len(self._known):
            self._start, skip = start, 0
            length = max(count, min(STRETCH, self._order.size))
            self._known = self._order.indices(start, length)
        return self._known[skip : skip + count]

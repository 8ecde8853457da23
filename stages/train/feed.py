"""What each step trains on, as a pure function of the position in the global order."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pipeline.artifacts import Data
from pipeline.engine import DataShard
from pipeline.order import SampleOrder
from stages.train.batches import MicroBatch, collate, microbatches
from stages.train.causal_lm import TrainCausalLm


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
        self._order = SampleOrder(seed, len(data.train), shuffle=config.shuffle)
        self._end = None if config.epochs is None else round(config.epochs * len(data.train))
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

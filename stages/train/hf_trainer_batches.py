"""The global sample order as a data loader that the Trainer can count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.artifacts import Data, Progress
from pipeline.engine import DataShard
from stages.train.batches import MicroBatch, collate
from stages.train.feed import Feed


class MicroBatches:
    """This rank's micro-batches of the whole training, as many in each step, as one epoch.

    Iterating starts behind `progress`. Where a step's samples do not make as many micro-batches,
    empty ones fill it up, which changes no number.
    """

    def __init__(
        self, feed: Feed, data: Data, shard: DataShard, accumulation: int, progress: Progress
    ) -> None:
        self.dataset = data.train
        self._feed = feed
        self._pad_id = data.pad_id
        self._count = shard.count
        self._accumulation = accumulation
        self._progress = progress
        self._steps = feed.total_steps(progress)

    def __len__(self) -> int:
        return self._steps * self._accumulation

    def __iter__(self) -> Iterator[dict[str, Any]]:
        position = self._progress.samples
        for _ in range(self._progress.step, self._steps):
            targets = self._feed.targets(position)
            batches = [batch for batch, _ in self._feed.microbatches(position)]
            device = batches[0].input_ids.device
            empty = self._accumulation - len(batches)
            batches += [collate([], self._pad_id, device) for _ in range(empty)]
            for batch in batches:
                yield {**_inputs(batch), "scale": self._count / targets}
            position += self._feed.count(position)


def micro_batch(inputs: dict[str, Any]) -> MicroBatch:
    """What the loader has made of a micro-batch, back."""
    return MicroBatch(
        input_ids=inputs["input_ids"], labels=inputs["labels"], positions=inputs.get("positions")
    )


def _inputs(batch: MicroBatch) -> dict[str, Any]:
    return {key: value for key, value in vars(batch).items() if value is not None}

"""What each step trains on, as a pure function of the position in the global order."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pipeline.contracts.data import Data, Sample
from pipeline.contracts.engine import DataAxis
from pipeline.contracts.sample_order import ENDLESS, Order
from pipeline.contracts.training import Progress
from pipeline.errors import StageError
from stages.train.batches import MicroBatch, collate, microbatches
from stages.train.causal_lm import TrainCausalLm

if TYPE_CHECKING:
    from numpy.typing import NDArray

STRETCH = 1024
"""Positions of an order that are computed at once, at most an epoch."""


class Feed:
    """The training samples in their global order, cut for this rank."""

    def __init__(
        self,
        config: TrainCausalLm,
        data: Data,
        seed: int,
        shard: DataAxis,
        device: torch.device,
    ) -> None:
        self._data = data
        self._shard = shard
        self._device = device
        self._batch = config.global_batch_size
        self._micro = config.microbatch_size(shard.count)
        self._order = OrderStretch(data.train.order(seed, shuffle=config.shuffle))
        self._ahead = Ahead(self._prepared, config.workers)
        self._end = None if config.epochs is None else round(config.epochs * len(data.train))
        if self._end == 0:
            raise StageError(
                f"{config.epochs} epochs of {len(data.train)} samples are less than one sample"
            )
        self._steps = config.steps
        self.taken = BatchStats()

    def total_steps(self, progress: Progress) -> int:
        """Steps of the whole training. Epochs end at a sample: after fewer steps where anomalous
        batches were left out, and after however many with another global batch."""
        if self._end is None:
            assert self._steps is not None
            return self._steps
        left = max(self._end - progress.samples, 0)
        return progress.step + -(-left // self._batch)

    def count(self, position: int) -> int:
        """Samples of the step that starts at `position`; fewer than a batch only at the very
        end."""
        return self._batch if self._end is None else min(self._batch, self._end - position)

    def targets(self, position: int) -> int:
        """Target tokens of the whole step on all ranks, known without any communication."""
        indices = self._order.indices(position, self.count(position))
        return self._data.train.total_targets(indices)

    def samples(self, position: int) -> Iterator[Sample]:
        """The samples from `position` on, one after another, without end."""
        for place in itertools.count(position):
            (index,) = self._order.indices(place, 1).tolist()
            yield self._data.train[index]

    def microbatches(self, position: int) -> Iterator[tuple[MicroBatch, bool]]:
        """This rank's micro-batches of the step at `position`, each with whether it is the last.
        What they were and took is in `taken` afterwards."""
        parts = self._parts(position)
        following = functools.partial(self._parts, position + self.count(position))
        batches = self._ahead.take(parts, following)
        self.taken = taken = BatchStats()
        for part in parts:
            began = time.perf_counter()
            prepared = next(batches)
            taken.seconds += time.perf_counter() - began
            taken.tokens += sum(prepared.lengths)
            taken.squares += sum(length * length for length in prepared.lengths)
            yield prepared.batch, part.last

    def close(self) -> None:
        """End the threads."""
        self._ahead.close()

    def _parts(self, position: int) -> list[Part]:
        count = self.count(position)
        if count <= 0:
            return []
        indices = tuple(self._order.indices(position, count).tolist())
        ranges = microbatches(count, self._shard, self._micro)
        return [
            Part(position, place, indices[start:end], place == len(ranges) - 1)
            for place, (start, end) in enumerate(ranges)
        ]

    def _prepared(self, part: Part) -> Prepared:
        samples = [self._data.train[index] for index in part.indices]
        batch = collate(samples, self._data.pad_id, self._device)
        return Prepared(batch, [len(sample.input_ids) for sample in samples])


@dataclass
class BatchStats:
    """What a step's micro-batches were on this rank, and how long they were waited for."""

    tokens: int = 0
    """Without padding."""
    squares: int = 0
    """Sum of the squared lengths of samples, which the cost of attention grows with."""
    seconds: float = 0.0


class Prepared(NamedTuple):
    """A micro-batch, and the lengths of its samples without padding."""

    batch: MicroBatch
    lengths: list[int]


class Part(NamedTuple):
    """What one micro-batch is made of: the step's position, its place in the step, its samples."""

    position: int
    place: int
    indices: tuple[int, ...]
    last: bool


class Ahead:
    """Prepares a step's micro-batches in threads while the step before it is trained on."""

    def __init__(self, prepare: Callable[[Part], Prepared], workers: int) -> None:
        self._prepare = prepare
        self._pool = ThreadPoolExecutor(workers, "pipe-feed") if workers else None
        self._begun: dict[Part, Future[Prepared]] = {}

    def take(
        self, parts: Sequence[Part], following: Callable[[], Sequence[Part]]
    ) -> Iterator[Prepared]:
        """The micro-batches of `parts`, in order; what `following` gives is begun meanwhile."""
        if self._pool is None:
            yield from map(self._prepare, parts)
            return
        begun = self._begun
        taken = [begun.get(part) or self._pool.submit(self._prepare, part) for part in parts]
        self._begun = {part: self._pool.submit(self._prepare, part) for part in following()}
        for future in taken:
            yield future.result()

    def close(self) -> None:
        """Wait for what has begun, and end the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


class OrderStretch:
    """An order's indices, computed a stretch at a time.

    Most of a short computation is numpy's cost per call, and every step asks twice for the same.
    An order without an end is asked for no more than is needed: it may read data to tell.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._stretch = 0 if order.size == ENDLESS else min(STRETCH, order.size)
        self._start = 0
        self._known: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def indices(self, start: int, count: int) -> NDArray[np.int64]:
        """The samples at positions start ... start + count - 1; shape (count,)."""
        skip = start - self._start
        if skip < 0 or skip + count > len(self._known):
            self._start, skip = start, 0
            self._known = self._order.indices(start, max(count, self._stretch))
        return self._known[skip : skip + count]

"""Micro-batches of each step, as a pure function of the position in the global sample order.

A step takes the next `global_batch_size` samples of the global order. Each rank takes a contiguous
share of them, in rank order, and divides it into micro-batches; all shares, concatenated in rank
order, are the global batch. If samples do not divide evenly, some micro-batches are short or empty,
which changes no number: the loss is normalised over the whole step."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.profiler import record_function

from pipeline import Data, DataAxis, MicroBatch, Progress, Sample, StageError, Unit
from stages.batches.prefetch import Prefetch, Transfer
from stages.batches.samples import count_units, micro_batch, read

if TYPE_CHECKING:
    from stages.batches.settings import BatchPlan

WAIT = "pipe: wait for data"
"""Annotation of a profile around each wait for a micro-batch."""


def microbatches(count: int, axis: DataAxis, micro_batch_size: int) -> list[tuple[int, int]]:
    """Ranges of this rank's micro-batches within a batch of `count` samples. Every rank gets the
    same number of ranges, as collectives need; ranges may be empty."""
    share, extra = divmod(count, axis.count)  # shares differ by at most one
    start = axis.index * share + min(axis.index, extra)
    end = start + share + (axis.index < extra)
    pieces = -(-(share + bool(extra)) // micro_batch_size)
    edges = [min(start + piece * micro_batch_size, end) for piece in range(pieces + 1)]
    return list(itertools.pairwise(edges))


@dataclass(frozen=True)
class BatchStats:
    """Statistics of micro-batches on this rank."""

    tokens: float = 0
    """Tokens without padding."""
    squares: float = 0
    """Sum of the squared lengths of samples, to which the cost of attention is proportional."""
    seconds: float = 0.0
    """Time that training waited for them."""

    def __add__(self, other: BatchStats) -> BatchStats:
        return BatchStats(
            self.tokens + other.tokens, self.squares + other.squares, self.seconds + other.seconds
        )


CPU = torch.device("cpu")
Place = tuple[int, int]
"""A step's position, and the number of a micro-batch in it."""
Prepared = tuple[Callable[[], MicroBatch], list[int]]
"""A function that returns a micro-batch on the device, and the lengths of its samples without
padding."""


class Feed:
    """The training samples in their global order, divided for this rank."""

    def __init__(
        self,
        plan: BatchPlan,
        data: Data,
        seed: int,
        axis: DataAxis,
        device: torch.device,
        *,
        workers: int = 0,
        vocabulary: int | None = None,
    ) -> None:
        """Tokens are compared with the size of the `vocabulary`, if that is given."""
        self._data = data
        self.vocabulary = vocabulary
        self._axis = axis
        self._device = device
        self._batch = plan.global_batch_size
        self._micro = plan.microbatch_size(axis.count)
        order = data.train.order(seed, shuffle=plan.shuffle)
        # Every step asks twice; as many steps as there are micro-batches may be begun.
        steps = workers + 3
        self._indices = functools.lru_cache(maxsize=steps)(order.indices)
        self._shares = functools.lru_cache(maxsize=steps)(self._divided)
        self._transfer = Transfer(device)
        self._ahead = Prefetch(workers, self._prepare, self._places) if workers else None
        self._end = None if plan.epochs is None else round(plan.epochs * len(data.train))
        if self._end == 0:
            raise StageError(
                f"{plan.epochs} epochs of {len(data.train)} samples are less than one sample"
            )
        self._steps = plan.steps
        self._behind: int | None = None
        """Position after the last step of the training, if it is known."""

    def total_steps(self, progress: Progress) -> int:
        """Steps of the whole training. Epochs end at a sample: after fewer steps if anomalous
        batches were skipped, and after another number with another global batch."""
        if self._end is None:
            assert self._steps is not None
            return self._steps
        left = max(self._end - progress.samples, 0)
        return progress.step + -(-left // self._batch)

    def count(self, position: int) -> int:
        """Samples of the step at `position`; fewer than a batch only at the end of epochs."""
        return self._batch if self._end is None else min(self._batch, self._end - position)

    def counts(self, position: int, units: Iterable[Unit] = ()) -> dict[Unit, int]:
        """Target tokens of the whole step on all ranks, and its number of other units, known
        without communication."""
        return count_units(
            self._data, self._data.train, self._indices(position, self.count(position)), units
        )

    def samples(self, position: int) -> Iterator[Sample]:
        """The samples from `position` on, one after another, without end."""
        for place in itertools.count(position):
            (index,) = self._indices(place, 1).tolist()
            yield from read(self._data, self._data.train, [index])

    def microbatches(
        self, position: int, *, left: int | None = None
    ) -> Iterator[tuple[MicroBatch, BatchStats]]:
        """This rank's micro-batches of a step, each with its statistics. Raises DataError for a
        sample that is not as the set says. Nothing after the `left` steps of the training, this one
        included, is prepared; None: the end is not known."""
        self._behind = None if left is None else position + left * self._batch
        for number in range(len(self._shares(position))):
            began = time.perf_counter()
            place = position, number
            with record_function(WAIT):
                ahead = self._ahead
                received, lengths = self._prepare(place) if ahead is None else ahead.take(place)
                batch = received()
            seconds = time.perf_counter() - began
            squares = sum(length * length for length in lengths)
            yield batch, BatchStats(sum(lengths), squares, seconds)

    def close(self) -> None:
        """Wait for micro-batches that are being prepared, and end the threads."""
        if self._ahead is not None:
            self._ahead.close()

    def _divided(self, position: int) -> list[list[int]]:
        """Samples of each micro-batch of this rank in the step at `position`."""
        count = self.count(position)
        if count <= 0:
            return []
        indices = self._indices(position, count).tolist()
        return [indices[start:end] for start, end in microbatches(count, self._axis, self._micro)]

    def _places(self, place: Place) -> Iterator[Place]:
        """This rank's micro-batches from a place on, to the end of epochs or of the training."""
        position, first = place
        while self._behind is None or position < self._behind:
            count = len(self._shares(position))
            if not count:
                return
            for number in range(first, count):
                yield position, number
            position, first = position + self.count(position), 0

    def _prepare(self, place: Place) -> Prepared:
        position, number = place
        first = int(self._indices(position, self.count(position))[0])
        indices = self._shares(position)[number]
        batch, lengths = micro_batch(
            self._data, self._data.train, indices, first, CPU, self.vocabulary
        )
        return self._transfer.begin(batch), lengths

"""Micro-batches of each step, as a pure function of the position in the global sample order.

A step takes the next `global_batch_size` samples of the global order. Each rank takes a contiguous
share of them, in rank order, and divides it into micro-batches; all shares, concatenated in rank
order, are the global batch. If samples do not divide evenly, some micro-batches are short or empty,
which changes no number: the loss is normalised over the whole step."""

from __future__ import annotations

import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from pipeline import Data, DataAxis, MicroBatch, Progress, Sample, StageError, Unit
from stages.batches.layout import micro_batch, read
from stages.fields import BatchPlan

WAIT = "pipe: wait for data"
"""Annotation of a profile around each wait for a micro-batch."""
CPU = torch.device("cpu")
BatchKey = tuple[int, int]
"""A step's position, and the number of a micro-batch in it."""
Prepared = tuple[Callable[[], MicroBatch], list[int]]
"""A function that returns a micro-batch on the device, and the lengths of its samples without
padding."""


def microbatch_ranges(count: int, axis: DataAxis, micro_batch_size: int) -> list[tuple[int, int]]:
    """Ranges of this rank's micro-batches within a batch of `count` samples. Every rank gets the
    same number of ranges, as collectives need; ranges may be empty."""
    share, extra = divmod(count, axis.count)  # shares differ by at most one
    start = axis.index * share + min(axis.index, extra)
    end = start + share + (axis.index < extra)
    pieces = -(-(share + bool(extra)) // micro_batch_size)
    edges = [min(start + piece * micro_batch_size, end) for piece in range(pieces + 1)]
    return list(itertools.pairwise(edges))


class BatchStats(NamedTuple):
    """Statistics of micro-batches on this rank."""

    tokens: float = 0
    """Tokens without padding."""
    squares: float = 0
    """Sum of the squared lengths of samples, to which the cost of attention is proportional."""
    seconds: float = 0.0
    """Time that training waited for them."""


class Feed:
    """The training samples in their global order, divided for this rank."""

    def __init__(
        self, plan: BatchPlan, data: Data, seed: int, axis: DataAxis, device: torch.device, *,
        workers: int = 0, vocabulary: int | None = None,
    ) -> None:  # fmt: skip
        """Tokens are compared with the size of the `vocabulary`, if that is given. `workers`
        threads prepare the next micro-batches."""
        self.vocabulary = vocabulary
        self._data, self._axis, self._device = data, axis, device
        self._batch, self._steps = plan.global_batch_size, plan.steps
        self._micro = plan.microbatch_size(axis.count)
        order = data.train.order(seed, shuffle=plan.shuffle)
        # Shared by counts and micro-batches; as many steps as there are micro-batches may be begun.
        self._indices = functools.lru_cache(maxsize=workers + 3)(order.indices)
        self._shares = functools.lru_cache(maxsize=workers + 3)(self._divided)
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._pool = ThreadPoolExecutor(workers, "pipe-feed") if workers else None
        self._workers = workers
        self._begun: deque[tuple[BatchKey, Future[Prepared]]] = deque()
        self._keys: Iterator[BatchKey] = iter(())
        self._end = None if plan.epochs is None else round(plan.epochs * len(data.train))
        if self._end == 0:
            raise StageError(
                f"{plan.epochs} epochs of {len(data.train)} samples are less than one sample"
            )
        self._prepare_until: int | None = None
        """Position after the last step of the training, if it is known."""

    def total_steps(self, progress: Progress) -> int:
        """Steps of the whole training. Epochs end at a sample: after fewer steps if anomalous
        batches were skipped, and after another number with another global batch."""
        if self._end is None:
            assert self._steps is not None
            return self._steps
        left = max(self._end - progress.samples, 0)
        return progress.step + -(-left // self._batch)

    def samples_in_step(self, position: int) -> int:
        """Samples of the step at `position`; fewer than a batch only at the end of epochs."""
        return self._batch if self._end is None else min(self._batch, self._end - position)

    def unit_counts(self, position: int, units: Iterable[Unit] = ()) -> dict[Unit, int]:
        """Target tokens of the step on all ranks, and its numbers of other units, by arithmetic."""
        indices = self._indices(position, self.samples_in_step(position))
        found: dict[Unit, int] = {"targets": self._data.train.total_targets(indices)}
        if {"rows", "groups"} & {*units}:
            found["rows"] = self._data.train.total_rows(indices)
            found["groups"] = found["rows"] // self._data.group
        return found

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
        self._prepare_until = None if left is None else position + left * self._batch
        for number in range(len(self._shares(position))):
            began = time.perf_counter()
            with record_function(WAIT):
                received, lengths = self._next_prepared((position, number))
                batch = received()
            seconds = time.perf_counter() - began
            squares = sum(length * length for length in lengths)
            yield batch, BatchStats(sum(lengths), squares, seconds)

    def close(self) -> None:
        """Wait for micro-batches that are being prepared, and end the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _divided(self, position: int) -> list[list[int]]:
        """Samples of each micro-batch of this rank in the step at `position`."""
        count = self.samples_in_step(position)
        if count <= 0:
            return []
        indices = self._indices(position, count).tolist()
        ranges = microbatch_ranges(count, self._axis, self._micro)
        return [indices[start:end] for start, end in ranges]

    def _following(self, key: BatchKey) -> Iterator[BatchKey]:
        """This rank's micro-batches from one on, to the end of epochs or of the training."""
        position, first = key
        while self._prepare_until is None or position < self._prepare_until:
            count = len(self._shares(position))
            if not count:
                return
            for number in range(first, count):
                yield position, number
            position, first = position + self.samples_in_step(position), 0

    def _next_prepared(self, key: BatchKey) -> Prepared:
        """A micro-batch, and have threads prepare those after it; raises what preparing this one
        raised. Others that were begun are dropped, if this one is not the next."""
        if self._pool is None:
            return self._prepare(key)
        if not self._begun or self._begun[0][0] != key:
            for _, future in self._begun:
                future.cancel()
            self._begun.clear()
            self._keys = self._following(key)
            self._begun.append((key, self._pool.submit(self._prepare, next(self._keys))))
        prepared = self._begun.popleft()[1].result()
        while len(self._begun) <= self._workers:  # one is ready while each thread has one in hand
            try:
                following = next(self._keys, None)
            except Exception:  # raised again if this key is ever asked for
                self._keys, following = iter(()), None
            if following is None:
                break
            self._begun.append((following, self._pool.submit(self._prepare, following)))
        return prepared

    def _prepare(self, key: BatchKey) -> Prepared:
        """Lay a micro-batch out, and begin to copy it to the device; any thread may. A copy to a
        GPU has a separate stream and page-locked memory, so that neither the host nor the device
        waits: what the thread that receives the copy then launches waits for it."""
        position, number = key
        first = int(self._indices(position, self.samples_in_step(position))[0])
        indices, data = self._shares(position)[number], self._data
        batch, lengths = micro_batch(data, data.train, indices, first, CPU, self.vocabulary)
        device, stream = self._device, self._stream
        if stream is None:
            there = batch.changed(lambda tensor: tensor.to(device))
            return (lambda: there), lengths
        # Otherwise a thread would go back to the node's first GPU after the copy, and take memory
        # there.
        torch.cuda.set_device(device)
        with torch.cuda.stream(stream):
            there = batch.changed(lambda tensor: tensor.pin_memory().to(device, non_blocking=True))
            sent = stream.record_event()

        def received() -> MicroBatch:
            current = torch.cuda.current_stream(device)
            current.wait_event(sent)

            def recorded(tensor: Tensor) -> Tensor:
                # The memory is the copying stream's, which must not take it back before this one
                # is done with it.
                tensor.record_stream(current)
                return tensor

            return there.changed(recorded)

        return received, lengths

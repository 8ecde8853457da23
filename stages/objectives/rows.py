"""Measurements of each row of a sample set, in the order of the data."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator

import numpy as np
import torch
from torch import Tensor

from pipeline import Data, DistContext, Engine, Measure, MicroBatch, Samples
from stages.batches.feed import microbatches
from stages.batches.samples import micro_batch

BLOCK = 16
"""Micro-batches on each rank whose results are shared at once."""


def rows_in_order(
    engine: Engine,
    measure: Measure,
    data: Data,
    samples: Samples,
    micro_batch_size: int,
    dist: DistContext,
    layout: Callable[[MicroBatch], MicroBatch] = lambda batch: batch,
    *,
    vocabulary: int | None = None,
) -> Generator[Tensor | None]:
    """Yield what `measure` says of each row of one of the data's sets, in order and block by block,
    on every rank; shape (rows, width), fp64 (collective). None, the last one, if a rank was asked
    to stop, after which no micro-batch is read. `layout` changes each micro-batch before it is
    measured. Tokens are compared with the size of the `vocabulary`, if that is given. Raises
    DataError for a sample that is not as the set says."""
    axis, total = engine.data_axis, len(samples)
    step = axis.count * micro_batch_size * BLOCK
    blocks = [(start, min(start + step, total)) for start in range(0, total, step)]
    shares = [
        [(a + start, a + end) for start, end in microbatches(b - a, axis, micro_batch_size)]
        for a, b in blocks
    ]

    stopped = False

    def batches() -> Iterator[MicroBatch]:
        nonlocal stopped
        for start, end in itertools.chain.from_iterable(shares):
            dist.heartbeat.beat()
            stopped = dist.any(dist.stop.asked)
            if stopped:
                return
            own = range(start, end)
            yield layout(micro_batch(data, samples, own, 0, engine.device, vocabulary)[0])

    def rows(start: int, end: int) -> int:
        return samples.total_rows(np.arange(start, end))

    with contextlib.closing(engine.evaluate(batches(), measure)) as results:
        for (first, last), own in zip(blocks, shares, strict=True):
            place, rest = rows(first, own[0][0]), rows(own[0][0], last)
            found = torch.zeros(
                place + rest, measure.width, dtype=torch.float64, device=engine.device
            )
            for part in itertools.islice(results, len(own)):
                if part is not None:
                    found[place : place + len(part)] = part
                    place += len(part)
            if stopped:
                yield None
                return
            yield engine.total(found)

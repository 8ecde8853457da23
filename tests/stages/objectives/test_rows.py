"""Rows of a sample set are measured until a rank is asked to stop."""

from __future__ import annotations

import contextlib
import itertools
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.contracts.data import Data, MicroBatch
from pipeline.contracts.engine import DataAxis
from pipeline.distributed.process_group import DistContext
from pipeline.distributed.signals import Interrupted
from stages.objectives.cross_entropy import RowLoss
from stages.objectives.rows import BLOCK, rows_in_order
from tests.support.runs import ToySamples

SAMPLES = ToySamples(2 * BLOCK + 3, 101, 3)
DATA = Data(train=SAMPLES, heldout=None, pad_id=0, identity={})


@dataclass
class Counter:
    """An engine that measures the length of each row, and is asked to stop at one of them."""

    stop_at: int | None = None
    ahead: int = 1
    """Micro-batches that it takes before it measures the first of them."""
    taken: int = 0
    device = torch.device("cpu")
    data_axis = DataAxis(index=0, count=1)

    def evaluate(self, batches: Iterable[MicroBatch], measure: Any) -> Iterator[Tensor]:
        held = []
        for batch in batches:
            held.append(torch.tensor([[batch.input_ids.shape[1]]]))
            self.taken += 1
            if self.taken == self.stop_at:
                signal.raise_signal(signal.SIGTERM)
            if len(held) == self.ahead:
                yield from held
                held = []
        yield from held

    def total(self, values: Tensor) -> Tensor:
        return values


def measured(engine: Any) -> Iterator[list[int] | None]:
    """Yield what is found of each block, until a stop."""
    dist = DistContext(device=torch.device("cpu"))
    with contextlib.suppress(Interrupted), dist.stop.deferred():
        for rows in rows_in_order(engine, RowLoss(), DATA, SAMPLES, 1, dist):
            yield None if rows is None else rows[:, 0].tolist()


LENGTHS = [len(SAMPLES[number].input_ids) for number in range(len(SAMPLES))]


@pytest.mark.parametrize("ahead", [1, 4, BLOCK + 1])
def test_blocks_are_whole_and_in_order(ahead: int) -> None:
    ends = [0, BLOCK, 2 * BLOCK, len(LENGTHS)]
    expected = [LENGTHS[start:end] for start, end in itertools.pairwise(ends)]
    assert [*measured(Counter(ahead=ahead))] == expected


@pytest.mark.parametrize("ahead", [1, 4])
def test_no_further_micro_batch_is_read_once_a_stop_is_asked_for(ahead: int) -> None:
    engine = Counter(stop_at=BLOCK + 3, ahead=ahead)
    assert [*measured(engine)] == [LENGTHS[:BLOCK], None]
    assert engine.taken == BLOCK + 3

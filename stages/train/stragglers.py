"""Find ranks that hold up the others.

The time of a step is the same on all ranks, since they wait for each other. So a rank is judged by
what it does without others: its wait for data, and the same arithmetic on every rank, timed between
steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline import Context

EVERY = 25
"""Steps between two comparisons."""
MARGIN = 1.5
"""A rank that takes this many times as long as the others is named."""
LEAST_SHARE = 0.1
"""Share of the step that it must cost."""
REPEATS = 5
ROWS = {"cpu": 384, "cuda": 2048}
"""Rows of the square matrices whose product is timed; 16 MiB on a GPU."""
PRODUCTS = {"cpu": 1, "cuda": 20}
"""Products in one timing, which is about a millisecond."""


class Figures(NamedTuple):
    """Seconds that one rank takes without the others."""

    step: float
    """Mean of a step."""
    data: float
    """Mean wait for data in a step."""
    arithmetic: float
    """Time of the same products of matrices on every rank."""


def stragglers(figures: Sequence[Figures]) -> Iterator[tuple[int, float, str]]:
    """Ranks that hold up the others, by the figures of all in rank order: each with the share of
    the step's time that it costs, and why."""
    step = statistics.fmean(one.step for one in figures)
    for rank, own in enumerate(figures):
        others = [one for number, one in enumerate(figures) if number != rank]
        if not others:
            return
        usual = statistics.median(one.data for one in others)
        share = (own.data - usual) / step
        if own.data > MARGIN * usual and share > LEAST_SHARE:
            why = f"it waits {own.data:.3g} s for data, the others {usual:.3g} s"
            yield rank, share, why
        usual = statistics.median(one.arithmetic for one in others)
        factor = own.arithmetic / usual
        if factor > MARGIN:
            why = f"it takes {factor:.1f} times as long for the same arithmetic"
            yield rank, 1 - 1 / factor, why


class StragglerWatch:
    """Compares the ranks every EVERY steps."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._steps, self._seconds, self._data = 0, 0.0, 0.0
        self._matrices: tuple[Tensor, Tensor] | None = None

    def look(self, step: int, *, seconds: float, data: float) -> bool:
        """Take note of a step that took `seconds`, `data` of them waiting for data on this rank;
        compare the ranks if it is time (collective), and return whether it was."""
        dist = self.ctx.dist
        if dist.world_size == 1:
            return False
        self._steps, self._seconds = self._steps + 1, self._seconds + seconds
        self._data += data
        if self._steps < EVERY:
            return False
        own = Figures(self._seconds / self._steps, self._data / self._steps, self._arithmetic())
        self._steps, self._seconds, self._data = 0, 0.0, 0.0
        for rank, share, why in stragglers([Figures(*one) for one in dist.gather(own)]):
            message = "step %d: rank %d holds up the others for %.0f%% of a step: %s"
            self.ctx.log.warning(message, step, rank, 100 * share, why)
            record = {"straggler": rank, "share": round(share, 3), "why": why}
            self.ctx.metrics.write_training({"step": step, "time": time.time(), **record})
        return True

    def _arithmetic(self) -> float:
        """Shortest of a few timings: what else the machine does at a moment is not its speed, and
        the first may include the device's work on the step that is launched."""
        device = self.ctx.dist.device
        if self._matrices is None:
            rows = ROWS[device.type]
            dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
            factor = torch.full((rows, rows), 1 / rows, device=device, dtype=dtype)
            self._matrices = factor, torch.empty_like(factor)
        factor, product = self._matrices
        shortest = float("inf")
        for _ in range(REPEATS):
            began = time.perf_counter()
            for _ in range(PRODUCTS[device.type]):
                torch.mm(factor, factor, out=product)
            float(product[0, 0])  # waits for the device
            shortest = min(shortest, time.perf_counter() - began)
        return shortest

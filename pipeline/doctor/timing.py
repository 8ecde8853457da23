"""How long something takes on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

FEWEST, MOST = 1, 50
"""Repetitions: even what takes long is timed once after its warm-up."""


def wait_for(device: str) -> None:
    """GPUs work while the program goes on; wait until they are done."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def seconds_each(
    action: Callable[[], object],
    *,
    device: str,
    budget: float,
    agree: Callable[[float], float] = lambda seconds: seconds,
) -> float:
    """Mean seconds of one `action`, over as many as fit in `budget` seconds.

    `agree` makes one number of those of all ranks, which must repeat it equally often, and has them
    wait for each other.
    """
    _timed(action, 1, device)  # caches, connections, clocks
    once = agree(_timed(action, 1, device))
    count = min(max(int(budget / once), FEWEST), MOST)
    return agree(_timed(action, count, device)) / count


def _timed(action: Callable[[], object], count: int, device: str) -> float:
    wait_for(device)
    start = time.perf_counter()
    for _ in range(count):
        action()
    wait_for(device)
    return max(time.perf_counter() - start, 1e-9)

"""Time an action in a process of a measurement, or in several processes at the same moment."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

Record = Callable[[dict[str, Any]], None]
"""Writes one result of a measurement."""
FEWEST, MOST = 1, 50
"""Repetitions of an action, after its warm-up."""
LEEWAY = 0.03
"""Seconds from the last rank's arrival to the common departure: torch's file store polls every
10 ms."""


def seconds_each(
    action: Callable[[], object],
    *,
    device: str,
    budget: float,
    agree: Callable[[float], float] = lambda seconds: seconds,
) -> float:
    """Mean seconds of one `action`, repeated for about `budget` seconds.

    `agree` returns one time for all ranks, which so repeat the action equally often, and makes them
    wait for each other.
    """
    _timed(action, 1, device)  # warm up caches, connections, clocks
    once = agree(_timed(action, 1, device))
    count = min(max(int(budget / once), FEWEST), MOST)
    return agree(_timed(action, count, device)) / count


def _timed(action: Callable[[], object], count: int, device: str) -> float:
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        action()
    _synchronize(device)
    return max(time.perf_counter() - start, 1e-9)


def _synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


class Rendezvous:
    """Meeting point of a measurement's processes: a file, as a network may be what is broken."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        import torch.distributed as dist

        self._rank, self._procs = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.store = dist.FileStore(settings["store"], self._procs)  # type: ignore[attr-defined]
        self._calls = 0

    def slowest(self, seconds: float) -> float:
        """The longest time of all ranks; they return from this at the same moment (collective)."""
        if self._procs == 1:
            return seconds
        self._calls += 1
        own = {"seconds": seconds, "go": time.monotonic() + LEEWAY}
        self.store.set(f"{self._calls}/{self._rank}", json.dumps(own))
        ranks = [json.loads(self.store.get(f"{self._calls}/{r}")) for r in range(self._procs)]
        # the processes of a machine share one clock
        time.sleep(max(0.0, max(rank["go"] for rank in ranks) - time.monotonic()))
        return float(max(rank["seconds"] for rank in ranks))

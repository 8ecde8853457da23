"""Ranks of this machine that measure at the same time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

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


LEEWAY = 0.03
"""Seconds between the last rank's coming and all ranks' going on: torch looks into its file every
10 ms."""


class Rendezvous:
    """This process among those of its measurement. They meet in a file, because a network between
    them may be what is broken."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        import torch.distributed as dist

        self._rank, self._procs = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._store = dist.FileStore(settings["store"], self._procs)  # type: ignore[attr-defined]
        self._calls = 0

    def slowest(self, seconds: float) -> float:
        """The longest of all ranks' times, on all of them, which leave this together
        (collective)."""
        if self._procs == 1:
            return seconds
        self._calls += 1
        own = {"seconds": seconds, "go": time.monotonic() + LEEWAY}
        self._store.set(f"{self._calls}/{self._rank}", json.dumps(own))
        told = [json.loads(self._store.get(f"{self._calls}/{r}")) for r in range(self._procs)]
        # one clock for all processes of a machine
        time.sleep(max(0.0, max(each["go"] for each in told) - time.monotonic()))
        longest: float = max(each["seconds"] for each in told)
        return longest

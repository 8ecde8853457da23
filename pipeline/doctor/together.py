"""Ranks of this machine that measure at the same time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

LEEWAY = 0.03
"""Seconds between the last rank's coming and all ranks' going on: torch looks into its file every
10 ms."""


class Together:
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

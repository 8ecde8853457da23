"""Find ranks that give no sign of life any more."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.distributed.heartbeat import Beat
from pipeline.distributed.launch import Timeouts

LOOK_SECONDS = 1.0
"""Seconds between two looks at the heartbeats."""
FROZEN_SECONDS = 20.0
"""Seconds after which a process that somebody has stopped (SIGSTOP) counts as stalled."""
SUSPENDED_SECONDS = 5.0
"""Seconds without a look after which this process itself must have been suspended, the others
possibly with it."""


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A rank of this machine that stands still."""

    number: int
    """Its number on this machine."""
    beat: Beat
    seconds: float
    """Seconds since its last sign of life."""
    stopped: bool
    """Whether a signal has stopped the process (SIGSTOP)."""

    def describe(self) -> str:
        """The rank's state, to follow its name."""
        why = ": something has stopped its process (SIGSTOP)" if self.stopped else ""
        return f"has given no sign of life for {self.seconds:.0f} s{self.beat.where()}{why}"


class Watchdog:
    """Looks at the signs of life of ranks of this machine: a launcher at all ranks that it has
    started, a rank without such a launcher at itself."""

    def __init__(
        self, beats: Sequence[Callable[[], Beat]], pids: Sequence[int], timeouts: Timeouts
    ) -> None:
        """`beats` read the newest sign of life of each rank, `pids` are the ranks' processes."""
        self._read, self._pids, self._timeouts = beats, pids, timeouts
        self._looked = time.monotonic()
        self._beats = [read() for read in beats]
        self._changed = [self._looked] * len(pids)
        self._stopped: dict[int, float] = {}
        """Number of a stopped process -> time at which that was seen first."""

    def stalled(self) -> list[Stall]:
        """Ranks that are over their time, stopped ones (SIGSTOP) first, then by their last sign of
        life; empty if it is too early to look again."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return []
        if now - self._looked > SUSPENDED_SECONDS:
            self._changed = [now] * len(self._pids)
            self._stopped.clear()
        self._looked = now
        stalls = [stall for n in range(len(self._pids)) if (stall := self._look(n, now))]
        return sorted(stalls, key=lambda stall: (not stall.stopped, -stall.seconds))

    def _look(self, number: int, now: float) -> Stall | None:
        beat = self._read[number]()
        if beat.time != self._beats[number].time or beat.waits:
            self._changed[number] = now
        self._beats[number] = beat
        frozen = 0.0
        if _state(self._pids[number]) == "T":
            frozen = now - self._stopped.setdefault(number, now)
        else:
            self._stopped.pop(number, None)
        stopped = frozen > FROZEN_SECONDS  # nobody seems to go on with it
        seconds = max(now - self._changed[number], frozen if stopped else 0.0)
        if stopped or seconds > getattr(self._timeouts, beat.phase.limit):
            return Stall(number=number, beat=beat, seconds=seconds, stopped=stopped)
        return None


def _state(pid: int) -> str:
    """The letter that Linux has for the state of a process, T if it is stopped; empty if there is
    none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""

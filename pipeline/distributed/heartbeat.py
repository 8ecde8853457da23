"""Signs of life of ranks, in memory that their launcher reads, and a watchdog over them."""

from __future__ import annotations

import contextlib
import enum
import mmap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pipeline.distributed.settings import Timeouts

FIELDS = 8
"""Numbers of one rank: time, phase, step, waits, landmarks, and three that are not used, so that no
two ranks share a cache line. Each is written in one store of the processor."""
LOOK_SECONDS = 1.0
"""Seconds between two looks at the heartbeats."""
FROZEN_SECONDS = 20.0
"""Seconds after which a process that somebody has stopped (SIGSTOP) counts as stalled."""
SUSPENDED_SECONDS = 5.0
"""Seconds without a look after which this process itself must have been suspended."""


class Phase(enum.IntEnum):
    """Part of a run with its own time limit between signs of life."""

    LOAD = 0
    """All that is none of the others: loading, tokenising, exporting."""
    STEP = 1
    EVALUATE = 2
    SAVE = 3


class Beat(NamedTuple):
    """A rank's newest sign of life."""

    time: float
    """Seconds of the machine's monotonic clock; 0 before the first."""
    phase: Phase
    step: int
    """Training step that it works on, from 1; 0 before the first."""
    waits: bool
    """Whether it waits for other ranks, and so is not the one that holds up the run."""
    landmarks: int
    """Checkpoints and durable results that it has brought to an end since its start."""


@dataclass(eq=False)
class Heartbeat:
    """A rank's signs of life: its own, in private memory unless a launcher looks at them."""

    _numbers: memoryview[float] = field(
        default_factory=lambda: memoryview(bytearray(8 * FIELDS)).cast("d")
    )

    def beat(self, phase: Phase | None = None, *, step: int | None = None) -> None:
        """Give a sign of life, from a new phase or step if given; takes about a microsecond."""
        if phase is not None:
            self._numbers[1] = phase
        if step is not None:
            self._numbers[2] = step
        self._numbers[0] = time.monotonic()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for other ranks in the body, however long."""
        self._numbers[3] += 1
        try:
            yield
        finally:
            self.beat()
            self._numbers[3] -= 1

    def landmark(self) -> None:
        """Note that something was brought to an end which a restart need not repeat."""
        self._numbers[4] += 1

    def read(self) -> Beat:
        """The newest sign of life."""
        when, phase, step, waits, landmarks = self._numbers[:5]
        return Beat(when, Phase(int(phase)), int(step), waits > 0, int(landmarks))


def heartbeats(descriptor: int) -> list[Heartbeat]:
    """The heartbeats of all ranks of this machine, by local rank, in the file that they share."""
    numbers = memoryview(mmap.mmap(descriptor, 0)).cast("d")
    return [Heartbeat(numbers[at : at + FIELDS]) for at in range(0, len(numbers), FIELDS)]


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
        """The rank's state, to follow its name; with its step once it trains."""
        doing = {Phase.SAVE: "saving", Phase.EVALUATE: "evaluating"}.get(self.beat.phase)
        where = f" in step {self.beat.step}" if self.beat.step else ""
        where = f" while {doing} at step {self.beat.step}" if doing else where
        why = ": something has stopped its process (SIGSTOP)" if self.stopped else ""
        return f"has given no sign of life for {self.seconds:.0f} s{where}{why}"


class Watchdog:
    """Looks at the signs of life of ranks of this machine: a launcher at all ranks that it has
    started, a rank without such a launcher at itself."""

    def __init__(self, ranks: Sequence[Heartbeat], pids: Sequence[int], timeouts: Timeouts) -> None:
        self._ranks, self._pids = ranks, pids
        self._limits = {
            Phase.LOAD: timeouts.load, Phase.STEP: timeouts.step, Phase.EVALUATE: timeouts.step,
            Phase.SAVE: timeouts.save,
        }  # fmt: skip
        self._looked = time.monotonic()
        self._beats = [rank.read() for rank in ranks]
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
        self._looked, stalls = now, list[Stall]()
        for number, pid in enumerate(self._pids):
            beat, frozen = self._ranks[number].read(), 0.0
            if beat.time != self._beats[number].time or beat.waits:
                self._changed[number] = now
            self._beats[number] = beat
            if _is_stopped(pid):
                frozen = now - self._stopped.setdefault(number, now)
            else:
                self._stopped.pop(number, None)
            stopped = frozen > FROZEN_SECONDS  # nobody seems to go on with it
            seconds = max(now - self._changed[number], frozen if stopped else 0.0)
            if stopped or seconds > self._limits[beat.phase]:
                stalls.append(Stall(number=number, beat=beat, seconds=seconds, stopped=stopped))
        return sorted(stalls, key=lambda stall: (not stall.stopped, -stall.seconds))


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process, as Linux says."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False

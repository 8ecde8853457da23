"""A rank's signs of life: where it is and since when, in memory that its launcher reads."""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeline.distributed.environment import shared
from pipeline.utils.files import memory_file

_FIELDS = 8
"""Numbers of one rank: time, phase, step, waits, landmarks, and three that are not used, so that no
two ranks share a cache line. Each is written in one store of the processor."""


class Phase(enum.IntEnum):
    """Part of a run with its own time limit between signs of life."""

    LOAD = 0
    """All that is none of the others: loading, tokenising, exporting."""
    STEP = 1
    EVALUATE = 2
    SAVE = 3

    @property
    def limit(self) -> str:
        """Name of its time limit, a field of `launch.timeouts`."""
        return {Phase.STEP: "step", Phase.EVALUATE: "step", Phase.SAVE: "save"}.get(self, "load")


@dataclass(frozen=True, kw_only=True)
class Beat:
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

    def where(self) -> str:
        """Where it was, to follow a description of the problem; empty before training."""
        if self.phase in (Phase.SAVE, Phase.EVALUATE):
            doing = "saving" if self.phase is Phase.SAVE else "evaluating"
            return f" while {doing} at step {self.step}"
        return f" in step {self.step}" if self.step else ""


@dataclass(eq=False)
class Heartbeat:
    """Writes this rank's signs of life."""

    _numbers: memoryview[float] = field(default_factory=lambda: memoryview(bytearray(64)).cast("d"))

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

    def read(self) -> Beat:
        """The newest sign of life."""
        return _beat(self._numbers)

    def landmark(self) -> None:
        """Note that something was brought to an end which a restart need not repeat."""
        self._numbers[4] += 1


class Heartbeats:
    """The heartbeats of the ranks of this machine, in memory that they share with their launcher.
    `descriptor` is what they open."""

    def __init__(self, ranks: int) -> None:
        self.descriptor = memory_file("heartbeats")
        os.truncate(self.descriptor, ranks * _FIELDS * 8)
        self._map = mmap.mmap(self.descriptor, ranks * _FIELDS * 8)
        self._numbers = memoryview(self._map).cast("d")

    def read(self, rank: int) -> Beat:
        """The newest sign of life of the rank with this local number."""
        return _beat(self._numbers[rank * _FIELDS :])

    def writer(self, rank: int) -> Heartbeat:
        """The rank's own side."""
        return Heartbeat(self._numbers[rank * _FIELDS : (rank + 1) * _FIELDS])

    def close(self) -> None:
        """Release the memory; ranks that have it keep it."""
        self._numbers.release()
        self._map.close()
        os.close(self.descriptor)


def _beat(numbers: memoryview[float]) -> Beat:
    time_, phase, step, waits, landmarks = numbers[:5]
    return Beat(
        time=time_,
        phase=Phase(int(phase)),
        step=int(step),
        waits=waits > 0,
        landmarks=int(landmarks),
    )


def own_heartbeat() -> Heartbeat:
    """This rank's place in its launcher's memory; private memory where no one looks."""
    own = shared()
    if own is None:
        return Heartbeat()
    numbers = memoryview(mmap.mmap(own.heartbeats, 0)).cast("d")
    first = int(os.environ["LOCAL_RANK"]) * _FIELDS
    return Heartbeat(numbers[first : first + _FIELDS])

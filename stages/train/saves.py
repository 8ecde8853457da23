"""Saves of a run: when one counts, and what it cost."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline import Checkpoints, Progress, StepCallback, WrittenCheckpoint
from stages.train.report import Reporter

FEWEST, MOST = 3, 20
"""Steps without a save, whose median is the time of a step."""
MOST_BESIDE = 10_000
"""Steps that are known during a save; nothing is reported of one that takes more."""


@dataclass(kw_only=True, eq=False)
class Saves(StepCallback):
    """Checkpoints that training writes, each reported once when it is saved, and once when it is on
    disk and the steps during it are known."""

    checkpoints: Checkpoints
    reporter: Reporter
    newest: int
    """Step of the newest checkpoint."""
    _writes: bool = field(default=False, init=False)
    """Whether a save may be being written."""
    _written: list[WrittenCheckpoint] = field(default_factory=list, init=False)
    """Saves that are on disk and not yet reported so."""
    _alone: deque[float] = field(default_factory=lambda: deque(maxlen=MOST), init=False)
    """Seconds of the newest steps during which no save was written."""
    _beside: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=MOST_BESIDE), init=False
    )
    """Beginnings and seconds of the steps since the save that is being written."""

    def save(self, progress: Progress) -> None:
        """Save (collective). A second save of a step only amends its checkpoint."""
        began = time.perf_counter()
        self.checkpoints.save(progress)
        stalled = time.perf_counter() - began
        self.poll()
        self._look()
        if progress.step != self.newest:
            self.newest, self._writes = progress.step, True
            self._beside.clear()
            self.reporter.saved(progress.step, stalled=stalled)

    def finish(self) -> str:
        """Wait until the last checkpoint is on disk; returns its address (collective)."""
        last = self.checkpoints.finish()
        self.poll()
        self._look()
        return last

    def poll(self) -> None:
        """Look after the save that is being written, after each step. Raises CheckpointError if it
        failed."""
        self._written += self.checkpoints.poll()

    def on_step(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        ended, seconds = record["time"], record["step_seconds"]
        if not record.get("profiled"):
            if self._writes:
                self._beside.append((ended - seconds, seconds))
            else:
                self._alone.append(seconds)
        self._look(until=ended)

    def _look(self, until: float | None = None) -> None:
        """Report what is on disk, if it was at the time `until`: steps during it are known then."""
        while self._written:
            ended = self._written[0].ended
            if until is not None and ended > until:
                return
            self.reporter.written(self._written.pop(0), slowed=self._slowed(ended))
            self._alone += [seconds for began, seconds in self._beside if began >= ended]
            self._writes = False
            self._beside.clear()

    def _slowed(self, ended: float) -> float | None:
        """Seconds by which the steps during a save that `ended` were longer than as many steps
        before it; None where too few are known."""
        beside = [seconds for began, seconds in self._beside if began < ended]
        if beside and (len(self._alone) < FEWEST or len(self._beside) == MOST_BESIDE):
            return None
        return sum((seconds - statistics.median(self._alone) for seconds in beside), 0.0)

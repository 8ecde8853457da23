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
"""Steps without a save beside them, of which a median says what a step takes."""


@dataclass(kw_only=True, eq=False)
class Saves(StepCallback):
    """Checkpoints that training writes, each reported once when it is saved, and once when it is on
    disk and the steps beside it are known."""

    checkpoints: Checkpoints
    reporter: Reporter
    newest: int
    """Step of the newest checkpoint."""
    _began: float | None = field(default=None, init=False)
    """Seconds since 1970 at which the save began that is being written; None without one."""
    _written: list[WrittenCheckpoint] = field(default_factory=list, init=False)
    """Saves that are on disk and not yet reported so."""
    _alone: deque[float] = field(default_factory=lambda: deque(maxlen=MOST), init=False)
    """Seconds of the newest steps that no save was written beside."""
    _beside: list[tuple[float, float]] = field(default_factory=list, init=False)
    """Beginnings and seconds of the steps since the save that is being written."""

    def save(self, progress: Progress) -> None:
        """Save (collective). A second save of a step only amends its checkpoint."""
        wall, began = time.time(), time.perf_counter()
        self.checkpoints.save(progress)
        stalled = time.perf_counter() - began
        self._look()
        if progress.step != self.newest:
            self.newest, self._began = progress.step, wall
            self.reporter.saved(progress.step, stalled=stalled)

    def finish(self) -> str:
        """Wait until the last checkpoint is on disk; returns its address (collective)."""
        last = self.checkpoints.finish()
        self._look()
        return last

    def on_step(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        ended, seconds = record["time"], record["step_seconds"]
        if not record.get("profiled"):
            if self._began is None:
                self._alone.append(seconds)
            else:
                self._beside.append((ended - seconds, seconds))
        self._look(until=ended)

    def _look(self, until: float | None = None) -> None:
        """Report what is on disk, if it was at the time `until`: steps beside it are known then."""
        self._written += self.checkpoints.written()
        while self._written and self._began is not None:
            ended = self._began + self._written[0].seconds
            if until is not None and ended > until:
                return
            self.reporter.written(self._written.pop(0), slowed=self._slowed(ended))
            self._alone += [seconds for began, seconds in self._beside if began >= ended]
            self._began, self._beside = None, []

    def _slowed(self, ended: float) -> float | None:
        """Seconds by which the steps beside a save that `ended` were longer than as many of those
        before it; None where too few are known."""
        beside = [seconds for began, seconds in self._beside if began < ended]
        if beside and len(self._alone) < FEWEST:
            return None
        return sum((seconds - statistics.median(self._alone) for seconds in beside), 0.0)

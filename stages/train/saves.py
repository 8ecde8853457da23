"""Saves of a run: when one counts, and how long it took."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pipeline import Checkpoints, Progress
from stages.train.report import Reporter


@dataclass(kw_only=True)
class Saves:
    """Checkpoints that training writes, each reported once."""

    checkpoints: Checkpoints
    reporter: Reporter
    newest: int
    """Step of the newest checkpoint."""
    _began: float | None = field(default=None, init=False)
    """Time at which the newest was begun; None if this process has begun none."""

    def save(self, progress: Progress) -> None:
        """Save (collective). A second save of a step only amends its checkpoint."""
        began = time.perf_counter()
        self.checkpoints.save(progress)
        stalled = time.perf_counter() - began
        if progress.step != self.newest:
            self.newest, self._began = progress.step, began
            self.reporter.saved(progress.step, stalled=stalled)

    def finish(self) -> str:
        """Wait until the last checkpoint is on disk; returns its address (collective)."""
        last = self.checkpoints.finish()
        if self._began is not None:
            self.reporter.written(self.newest, seconds=time.perf_counter() - self._began)
        return last

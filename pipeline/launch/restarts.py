"""Decide whether a failed run is started again, and when."""

from __future__ import annotations

from pipeline.errors import RunFailed
from pipeline.recipe.launch import Restarts


class Attempts:
    """Counts the starts of a run without progress."""

    def __init__(self, settings: Restarts) -> None:
        self._settings = settings
        self.number = 0
        """Restarts in a row without progress."""

    def wait_after(self, error: RunFailed, *, progressed: bool) -> float | None:
        """Seconds to wait before the next start; None to give up. `progressed` says whether the
        failed start has brought anything to an end that the next need not repeat."""
        wanted = error.restart == "always" or (error.restart == "after progress" and progressed)
        if progressed:
            self.number = 0
        if not wanted or self.number >= self._settings.limit:
            return None
        self.number += 1
        return self._settings.delay(self.number)

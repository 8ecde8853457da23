"""Trackers that fail or hang on request; a scratch distribution of the tests registers them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.track import Outcome, RunFacts, Tracker, TrackerStage

When = Literal["open", "log", "close"]


@dataclass(frozen=True, kw_only=True)
class TrackFailing(TrackerStage):
    """Fail or hang in a call."""

    at: When
    """The call."""
    hangs: bool = False
    """Hang instead of failing."""

    def tracker(self) -> Tracker:
        return Failing(self.at, self.hangs)


class Failing(Tracker):
    def __init__(self, at: When, hangs: bool) -> None:
        self.at, self.hangs = at, hangs

    def open(self, run: RunFacts, state: Mapping[str, Any]) -> Mapping[str, Any]:
        self._maybe("open")
        return {}

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        self._maybe("log")

    def close(self, outcome: Outcome) -> None:
        self._maybe("close")

    def _maybe(self, call: When) -> None:
        if call == self.at:
            if self.hangs:
                time.sleep(600)
            raise ConnectionError(f"no network in {call}\nmore of it")

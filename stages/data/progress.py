"""Lines on screen while data are tokenised."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

LOG_SECONDS = 10.0


@dataclass(kw_only=True)
class Reading:
    """How far through its source a reader has come. Sizes are bytes of files, or rows of a hub
    data set."""

    total: int = 0
    """Size of the whole source; 0 when that is not known."""
    _before: int = field(default=0, init=False)
    _size: int = field(default=0, init=False)
    _position: Callable[[], int] = field(default=lambda: 0, init=False)

    def enter(self, size: int, position: Callable[[], int]) -> None:
        """Begin a part of this size, in which `position` tells how far reading has come."""
        self._before += self._size
        self._size, self._position = size, position

    def fraction(self) -> float | None:
        """The part that is read, 0 to 1; None when that is not known."""
        if not self.total:
            return None
        return min(1.0, (self._before + self._position()) / self.total)


@dataclass(kw_only=True)
class Announcer:
    """Says every few seconds how far tokenising has come."""

    log: logging.Logger
    reading: Reading
    unit: str
    """What is counted: `rows`, `documents`."""
    seconds: float = LOG_SECONDS
    _began: float = field(init=False)
    _spoken: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self._spoken = time.monotonic()

    def tell(self, count: int, tokens: int) -> None:
        """Say it if it is time: `count` units with `tokens` tokens are done."""
        now = time.monotonic()
        if now - self._spoken < self.seconds:
            return
        self._spoken = now
        fraction = self.reading.fraction()
        self.log.info(
            "tokenising: %d %s, %d tokens, %.0f %s/s%s",
            count,
            self.unit,
            tokens,
            count / max(now - self._began, 1e-9),
            self.unit,
            "" if fraction is None else f", {fraction:.0%} read",
        )

"""Tell how fast bytes go somewhere, now and then and at the end."""

from __future__ import annotations

import difflib
import logging
import time
from collections.abc import Iterable


def closest(word: str, options: Iterable[str]) -> str | None:
    """The option most like `word`, if any is like it at all."""
    names = list(options)
    matches = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    # `length` is far from `sequence_length` by letters, but it is one of its words
    matches += [name for name in names if word in name.split("_") or name in word.split("_")]
    return matches[0] if matches else None


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """A hint that names the closest option, else lists the options; empty without options."""
    names = list(options)
    found = closest(word, names)
    if found is not None:
        return f"did you mean `{found}`?"
    return f"known here: {', '.join(names)}" if names else ""


EVERY = 10.0
"""Seconds between two lines."""


def human(size: float) -> str:
    """`1.5 GB`."""
    value, unit = float(size), "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


class Throughput:
    """Counts bytes that this process moves, of `total` where that is known."""

    def __init__(self, log: logging.Logger, doing: str, total: int | None = None) -> None:
        self._log = log
        self._doing = doing
        self._total = total
        self._done = 0
        self._began = self._told = time.monotonic()

    def advance(self, size: int) -> None:
        """`size` more bytes have been moved."""
        self._done += size
        now = time.monotonic()
        if now - self._told > EVERY:
            self._told = now
            of = "" if self._total is None else f" of {human(self._total)}"
            self._log.info("%s: %s%s", self._doing, human(self._done), of)

    def summary(self) -> str:
        """`1.5 GB in 2.0 s (0.8 GB/s)`."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        return f"{human(self._done)} in {seconds:.1f} s ({human(self._done / seconds)}/s)"

"""Text for people: suggestions, sizes, plurals, aligned columns, and the throughput of a copy."""

from __future__ import annotations

import difflib
import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Sequence


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


def plural(count: int, noun: str) -> str:
    """`1 error`, `2 errors`, `2 processes`."""
    ending = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{ending}"


def align(rows: Sequence[Sequence[str]], *, left: int = 1) -> Iterator[str]:
    """The rows as lines of columns, two blanks apart: the first `left` columns are aligned to the
    left, the others to the right. A row may have fewer cells than the others."""
    widths = [max(map(len, column)) for column in itertools.zip_longest(*rows, fillvalue="")]
    for row in rows:
        cells = zip(row, widths, strict=False)
        padded = (f"{cell:{'<' if i < left else '>'}{n}}" for i, (cell, n) in enumerate(cells))
        yield "  ".join(padded).rstrip()


class Throughput:
    """Counts bytes that this process moves, of `total` where that is known."""

    def __init__(self, log: logging.Logger, doing: str, total: int | None = None) -> None:
        self._log = log
        self._doing = doing
        self._total = total
        self._done = 0
        self._began = self._last_line = time.monotonic()

    def advance(self, size: int) -> None:
        """`size` more bytes have been moved."""
        self._done += size
        now = time.monotonic()
        if now - self._last_line > EVERY:
            self._last_line = now
            of = "" if self._total is None else f" of {human(self._total)}"
            self._log.info("%s: %s%s", self._doing, human(self._done), of)

    def summary(self) -> str:
        """`1.5 GB in 2.0 s (0.8 GB/s)`."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        return f"{human(self._done)} in {seconds:.1f} s ({human(self._done / seconds)}/s)"

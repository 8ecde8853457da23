"""Long pieces of work whose progress people can follow: tokenising, loading, saving, exporting.

Code that works says what it does and how far it is; whoever started the process says where that is
shown (`show_in`): a thread looks how far it is, so a call that takes minutes is shown as well.
Without a place, nothing is shown.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from pipeline.utils.text import counted, duration, human

BYTES = "B"
"""Unit of sizes, which are shown as `1.5 GB`."""
LOOK_SECONDS = 0.25
"""Seconds between two looks at what is under way."""


@dataclass(eq=False)
class Activity:
    """A piece of work under way."""

    name: str
    """A participle and its object: `tokenising train.jsonl`."""
    total: float | None = None
    """Amount of all of it; None if not known."""
    unit: str = ""
    """Plural of what is counted (`rows`), or BYTES."""
    done: float = 0
    began: float = field(default_factory=lambda: time.monotonic())

    def advance(self, amount: float = 1) -> None:
        """Note that `amount` more is done; costs less than a microsecond."""
        self.done += amount

    @property
    def amount(self) -> str:
        """Return what is done, with its unit: `5,000 rows`, `1.5 GB`."""
        return self._in_unit(self.done)

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return max(time.monotonic() - self.began, 1e-9)

    def describe(self) -> str:
        """Return `tokenising train.jsonl: 5,000 of 20,000 rows (25 %)`, `proving (0:20)`."""
        if self.total is None:
            if not self.unit:
                return f"{self.name} ({duration(self.seconds)})"
            rate = self._in_unit(self.done / self.seconds)
            return f"{self.name}: {self.amount}, {rate} a second"
        share = 100 * self.done / self.total if self.total else 100.0
        return f"{self.name}: {self.amount} of {self._in_unit(self.total)} ({share:.0f} %)"

    def summary(self) -> str:
        """Return `1.5 GB in 2.0 s (0.8 GB/s)` of bytes that were moved."""
        rate = human(self.done / self.seconds)
        return f"{human(self.done)} in {self.seconds:.1f} s ({rate}/s)"

    def _in_unit(self, value: float) -> str:
        return human(value) if self.unit == BYTES else counted(value, self.unit)


class Place(Protocol):
    """Where activities are shown. The methods are called in several threads, one at a time."""

    def changed(self, activity: Activity) -> None:
        """Show how far an activity is; called at its beginning and every LOOK_SECONDS."""

    def ended(self, activity: Activity) -> None:
        """Take an activity away that has ended, well or not."""


_lock = threading.Lock()
_place: Place | None = None
_under_way: list[Activity] = []


@contextlib.contextmanager
def in_thread(work: Callable[[threading.Event], None], name: str) -> Iterator[None]:
    """Run `work` in a daemon thread during the body; its event says that the body is over."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def show_in(place: Place) -> Iterator[None]:
    """Show this process's activities in a place while the body runs."""
    global _place

    def keep_looking(over: threading.Event) -> None:
        with contextlib.suppress(OSError):  # nobody reads any more
            while not over.wait(LOOK_SECONDS):
                look()

    with _lock:
        before, _place = _place, place
    try:
        with in_thread(keep_looking, "pipe-activities"):
            yield
    finally:
        with _lock:
            _place = before


def look() -> None:
    """Show how far everything is that is under way."""
    with _lock:
        for one in [*_under_way]:
            if _place is not None:
                _place.changed(one)


@contextlib.contextmanager
def activity(name: str, total: float | None = None, unit: str = "") -> Iterator[Activity]:
    """Do the body's work as an activity, which is shown until the body ends."""
    started = Activity(name, total, unit)
    try:
        _under_way.append(started)
        with contextlib.suppress(OSError), _lock:
            if _place is not None:
                _place.changed(started)
        yield started
    finally:
        _under_way.remove(started)  # first, as a signal may come while the lock is awaited
        with contextlib.suppress(OSError), _lock:
            if _place is not None:
                _place.ended(started)

"""A launching process's view of the run that it has started."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

from pipeline.errors import in_words
from pipeline.utils.terminal import shown

if TYPE_CHECKING:
    pass

Choice = Literal["live", "lines", "quiet", "json"]
LONG = 1 << 16
"""Bytes of an unfinished line from which on only the text after its last carriage return is
kept."""
LOOK_SECONDS = 0.5
"""Seconds between two looks at the run's folder."""


class Screen:
    """Shows a run while its launcher waits for the ranks; this one leaves that to rank 0."""

    output: int | None = None
    """Descriptor for rank 0's standard output and error; None: the launcher's own."""

    def refresh(self) -> None:
        """Show what is new. Called often, and costs nothing when it is too early."""

    def close(self) -> None:
        """Show what the ranks have done last, and leave the terminal as it was."""

    def end(self) -> None:
        """Show how the run has ended, which its folder says by now."""

    def abandon(self) -> None:
        """Give this process its output back after a failure."""

    def printed(self) -> list[str]:
        """Return the lines that rank 0 has printed to `output` and that were not shown, so that it
        never waits to print."""
        return []


class Harmless(Screen):
    """A screen whose failure is reported once and ends nothing else: a terminal that is gone, a
    reader of events that has ended. From then on rank 0's lines appear on standard error."""

    def __init__(self, make: Callable[[], Screen]) -> None:
        self._screen, self._failed = Screen(), False
        with self._guarded():
            self._screen = make()
        self.output = self._screen.output

    def refresh(self) -> None:
        if self._failed:
            self._pass_on()
        else:
            with self._guarded():
                self._screen.refresh()

    def close(self) -> None:
        with self._guarded():
            self._screen.close()
        if self._failed:
            self._pass_on()

    def end(self) -> None:
        if not self._failed:
            with self._guarded():
                self._screen.end()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # rich ends the program where nobody reads
            if not self._failed:
                self._failed = True
                with contextlib.suppress(Exception):
                    self._screen.abandon()
                _say(f"the display has ended: {in_words(error)}")

    def _pass_on(self) -> None:
        for line in self._screen.printed():
            _say(line)


def _say(line: str) -> None:
    """Print a line to standard error, if that can be."""
    with contextlib.suppress(Exception):
        print(shown(line), file=sys.stderr, flush=True)


class Now:
    """Says whether it is time for another look."""

    def __init__(self, seconds: float = LOOK_SECONDS) -> None:
        self._seconds, self._looked = seconds, 0.0

    def __call__(self) -> bool:
        """Return whether the last time that this was true is long enough ago."""
        now = time.monotonic()
        if now - self._looked < self._seconds:
            return False
        self._looked = now
        return True


class LinePipe:
    """A pipe for another process's lines, which never makes this one wait."""

    SIZE = 1 << 20
    """Bytes that it holds while no one reads, if the system allows as much."""

    def __init__(self) -> None:
        self._read, self.write = os.pipe()
        os.set_blocking(self._read, False)
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(self._read, fcntl.F_SETPIPE_SZ, self.SIZE)
        self._rest, self._closed = b"", False

    def lines(self) -> Iterator[str]:
        """Yield the complete lines that are new, without their ends; none once it is closed."""
        while not self._closed:
            try:
                data = os.read(self._read, 1 << 16)
            except BlockingIOError:
                return
            *whole, self._rest = (self._rest + data).split(b"\n")
            for line in whole:
                yield line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
            self._rest = self._rest.rpartition(b"\r")[2] if len(self._rest) > LONG else self._rest
            if not data:
                return

    def close(self) -> list[str]:
        """Return the lines that are left, an unfinished one too, and close both ends."""
        try:
            rest = [*self.lines()]
            return [*rest, self._rest.decode(errors="replace")] if self._rest else rest
        finally:
            self._closed = True
            for end in (self._read, self.write):
                os.close(end)

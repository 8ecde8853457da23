"""A launching process's view of the run that it has started."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pipeline.errors import in_words
from pipeline.utils.terminal import shown

if TYPE_CHECKING:
    from pipeline.execution.gpu_records import HardwareRecord

LONG = 1 << 16
"""Bytes of an unfinished line from which on only the text after its last carriage return is
kept."""


class View:
    """A way to show a run. This one shows nothing: rank 0 prints lines where this process does."""

    prints = False
    """Whether it prints what rank 0 prints."""

    def refresh(self, lines: deque[str]) -> None:
        """Show what is new, and print and remove the lines of rank 0. Called often, and costs
        nothing when it is too early."""

    def close(self, lines: deque[str]) -> None:
        """Show what the ranks have done last, and leave the terminal as it was."""

    def end(self) -> None:
        """Show how the run has ended, which its folder says by now."""

    def abandon(self) -> None:
        """Give this process its output back after a failure."""


class Screen:
    """Shows a run while its launcher waits for the ranks, and records this machine's GPUs.

    A view that fails (a terminal that is gone, a reader of events that has ended) is reported once
    and stops nothing else; from then on rank 0's lines appear on standard error.
    """

    output: int | None = None
    """Descriptor for rank 0's standard output and error; None: this process's own."""

    def __init__(
        self, make: Callable[[], View] = View, recorder: HardwareRecord | None = None
    ) -> None:
        self._view, self._failed, self._recorder = View(), False, recorder
        self._pipe: LinePipe | None = None
        self._lines = deque[str]()
        with self._guarded():
            self._view = make()
            if self._view.prints:
                self._pipe = LinePipe()
                self.output = self._pipe.write

    def refresh(self) -> None:
        """Show what is new, and record the GPUs. Called often."""
        if self._recorder is not None:
            with contextlib.suppress(Exception):  # only people read it
                self._recorder.look()
        if self._pipe is not None:
            self._lines.extend(self._pipe.lines())
        if not self._failed:
            with self._guarded():
                self._view.refresh(self._lines)
        else:
            self._pass_on()

    def close(self) -> None:
        """Show what the ranks have done last, and leave the terminal as it was."""
        if self._pipe is not None:
            self._lines.extend(self._pipe.close())
        with self._guarded():
            self._view.close(self._lines)
        if self._failed:
            self._pass_on()

    def end(self) -> None:
        """Show how the run has ended."""
        if not self._failed:
            with self._guarded():
                self._view.end()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # rich ends the program where nothing reads
            if not self._failed:
                self._failed = True
                with contextlib.suppress(Exception):
                    self._view.abandon()
                _say(f"the display has ended: {in_words(error)}")

    def _pass_on(self) -> None:
        while self._lines:
            _say(self._lines.popleft())


def _say(line: str) -> None:
    with contextlib.suppress(Exception):
        print(shown(line), file=sys.stderr, flush=True)


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

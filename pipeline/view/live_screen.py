"""The live display of a run, in the terminal of the process that has started it."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Iterator
from typing import TextIO, cast

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.text import Text

from pipeline.hardware.telemetry import GpuReading, Telemetry
from pipeline.utils.terminal import RedactingStream, bare, shown
from pipeline.view.live import ASCII, UNICODE, Header, drawing
from pipeline.view.run import Run
from pipeline.view.screen import LinePipe, Now, Screen

GPU_SECONDS = 2.0
"""Seconds between two readings of the GPUs."""


class LiveScreen(Screen):
    """Draws the run at the bottom of the terminal; what rank 0 and this process print goes above.

    Drawn by the thread that calls `refresh`, so nothing is drawn while that is busy.
    """

    def __init__(self, run: Run, header: Header, console: Console | None = None) -> None:
        self._run, self._header = run, header
        self._console = console or Console(file=bare(sys.stdout), highlight=False)
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._telemetry, self._gpus = Telemetry(), list[GpuReading]()
        self._time_to_draw, self._time_to_read = Now(), Now(GPU_SECONDS)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._live)
            stack.enter_context(_printing_above(self._console))
            self._pipe = LinePipe()
            self._stack = stack.pop_all()
        self.output, self._lines = self._pipe.write, deque[str]()

    def refresh(self) -> None:
        self._print_new()
        if self._time_to_draw():
            self._draw()

    def close(self) -> None:
        with self._stack:  # standard output is this process's again, whatever happens
            self._lines.extend(self._pipe.close())
            self._print_new()
            self._draw()

    def abandon(self) -> None:
        self._stack.close()

    def printed(self) -> list[str]:
        lines = [*self._lines, *self._pipe.lines()]
        self._lines.clear()
        return lines

    def _print_new(self) -> None:
        self._lines.extend(self._pipe.lines())
        while self._lines:
            self._console.print(Text(shown(self._lines[0])), soft_wrap=True)
            self._lines.popleft()

    def _draw(self) -> None:
        if self._time_to_read():
            self._gpus = self._telemetry.read()
        self._run.look()
        marks = ASCII if self._console.options.ascii_only else UNICODE
        width = self._console.width
        self._live.update(
            drawing(self._header, self._run, self._gpus, width=width, marks=marks), refresh=True
        )


@contextlib.contextmanager
def _printing_above(console: Console) -> Iterator[None]:
    """Have what this process prints in the body appear above the display, guarded as before."""

    def above(stream: TextIO) -> TextIO:
        return cast(TextIO, RedactingStream(cast(TextIO, FileProxy(console, bare(stream)))))

    before = sys.stdout, sys.stderr
    replaced = sys.stdout, sys.stderr = above(sys.stdout), above(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in replaced:
            stream.flush()

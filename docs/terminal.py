"""A command in a terminal of a given width, as pages that look like its screen."""

from __future__ import annotations

import fcntl
import html
import os
import pty
import select
import struct
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pyte

ROWS = 34
LIGHT = {
    "default": "#1f2328", "paper": "#ffffff", "black": "#1f2328", "red": "#cf222e",
    "green": "#116329", "brown": "#7d4e00", "blue": "#0969da", "magenta": "#8250df",
    "cyan": "#1b7c83", "white": "#6e7781", "brightblack": "#57606a",
}  # fmt: skip
DARK = {
    "default": "#e6edf3", "paper": "#0d1117", "black": "#484f58", "red": "#ff7b72",
    "green": "#3fb950", "brown": "#d29922", "blue": "#58a6ff", "magenta": "#bc8cff",
    "cyan": "#39c5cf", "white": "#b1bac4", "brightblack": "#8b949e",
}  # fmt: skip


def screens(
    command: Sequence[str], columns: int, *, at: Sequence[str], folder: Path
) -> dict[str, pyte.Screen]:
    """Run a command in a terminal; return its screen when each text of `at` was first shown, under
    that text, and at its end, under `end`. Exits if the command fails."""
    pid, terminal = _started(command, columns, ROWS, folder)
    screen, found = pyte.Screen(columns, ROWS), {}
    stream = pyte.ByteStream(screen)
    for output in _outputs(terminal):
        stream.feed(output)
        for text in at:
            if text not in found and text in "\n".join(screen.display):
                _settle(terminal, stream)
                found[text] = _copy(screen)
    _require_success(pid, screen)
    return {**found, "end": screen}


@dataclass(frozen=True)
class Frame:
    """A screen, and the seconds since its program began at which it was shown first."""

    seconds: float
    screen: pyte.Screen


def recorded(
    command: Sequence[str], columns: int, rows: int, *, folder: Path, hidden: Sequence[str] = ()
) -> list[Frame]:
    """Run a command in a terminal; return its screens, one for each change that stood for a fifth
    of a second, and the last. Texts that are `hidden` are left out of what it prints, such as
    the path of a temporary folder. Exits if the command fails."""
    pid, terminal = _started(command, columns, rows, folder)
    screen, frames, began = pyte.Screen(columns, rows), list[Frame](), time.monotonic()
    stream = pyte.ByteStream(screen)
    for output in _outputs(terminal):
        for text in hidden:
            output = output.replace(text.encode(), b"")
        stream.feed(output)
        if not select.select([terminal], [], [], 0.2)[0]:
            frames.append(Frame(time.monotonic() - began, _copy(screen)))
    _require_success(pid, screen)
    return [*frames, Frame(time.monotonic() - began, screen)]


def _started(command: Sequence[str], columns: int, rows: int, folder: Path) -> tuple[int, int]:
    """Start a command in a new terminal; return its process and the terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ["TERM"] = "xterm-256color"
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    return pid, terminal


def _require_success(pid: int, screen: pyte.Screen) -> None:
    _, status = os.waitpid(pid, 0)
    if status:
        sys.exit("\n".join(screen.display))


def _outputs(terminal: int) -> Iterator[bytes]:
    while True:
        try:
            output = os.read(terminal, 1 << 16)
        except OSError:  # the program has ended
            return
        if not output:
            return
        yield output


def _settle(terminal: int, stream: pyte.ByteStream) -> None:
    """Show what belongs to the same drawing."""
    end = time.monotonic() + 0.2
    while select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0]:
        try:
            stream.feed(os.read(terminal, 1 << 16))
        except OSError:
            return


def _copy(screen: pyte.Screen) -> pyte.Screen:
    copy = pyte.Screen(screen.columns, screen.lines)
    for row in range(screen.lines):
        for column in range(screen.columns):
            copy.buffer[row][column] = screen.buffer[row][column]
    return copy


def page(screen: pyte.Screen, *, dark: bool) -> str:
    """Return a page that looks like a screen, without the empty lines at its end."""
    colours = DARK if dark else LIGHT
    rows = [[screen.buffer[row][at] for at in range(screen.columns)] for row in range(ROWS)]
    while rows and not "".join(cell.data for cell in rows[-1]).strip():
        rows.pop()
    text = "\n".join("".join(_spans(row, colours)) for row in rows)
    style = (
        f"margin: 0; padding: 16px; font: 14px/1.35 'DejaVu Sans Mono', monospace; "
        f"color: {colours['default']}; background: {colours['paper']}"
    )
    return (
        f'<!doctype html><meta charset="utf-8"><body style="margin: 0; background: '
        f'{colours["paper"]}"><pre style="{style}">{text}</pre>'
    )


def _spans(row: Sequence[Any], colours: dict[str, str]) -> Iterator[str]:
    for (name, bold), cells in groupby(row, key=lambda cell: (cell.fg, cell.bold)):
        colour = colours.get(name) or (f"#{name}" if len(name) == 6 else colours["default"])
        weight = "; font-weight: bold" if bold else ""
        text = html.escape("".join(cell.data for cell in cells))
        yield f'<span style="color: {colour}{weight}">{text}</span>'

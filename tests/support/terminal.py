"""`pipe` in a terminal of a given size, and all that the terminal has shown."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable
from typing import Any

import pyte

from tests.support.pipe import LIMIT, Pipe, call_pipe
from tests.support.processes import forking
from tests.support.tier import FULL

ROWS = 30


class Terminal:
    """A terminal in which `pipe ARGUMENTS` runs; `frames` has the screen after each output."""

    def __init__(self, pipe: Pipe, *arguments: str, columns: int, **environment: str) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
        self.screen = pyte.HistoryScreen(columns, ROWS, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.frames: list[list[str]] = []
        variables = pipe.environment | {"TERM": "xterm-256color"} | environment
        for name in ("COLUMNS", "LINES"):
            variables.pop(name, None)
        work = (os.ttyname(slave), str(pipe.folder), variables, arguments)
        self._process = forking().Process(target=_real if FULL else _forked, args=work)
        self._process.start()
        self._slave = slave

    def wait(self, condition: Callable[[], object]) -> None:
        """Show what the program writes until a condition is true."""
        deadline = time.monotonic() + LIMIT
        while not condition():
            assert self._process.exitcode is None, "\n".join(self.text)
            assert time.monotonic() < deadline, "\n".join(self.text)
            self._show()

    def end(self) -> int:
        """Show everything to the end of the program; return its exit code."""
        deadline = time.monotonic() + LIMIT
        while self._process.exitcode is None:
            assert time.monotonic() < deadline, "\n".join(self.text)
            self._show()
        while self._show():
            pass
        for descriptor in (self._master, self._slave):
            os.close(descriptor)
        return int(self._process.exitcode)

    def press(self, keys: bytes) -> None:
        """Type into the terminal."""
        os.write(self._master, keys)

    def hang_up(self) -> int:
        """Close the terminal, as a lost connection does; return the program's exit code."""
        for descriptor in (self._master, self._slave):
            os.close(descriptor)
        self._process.join(LIMIT)
        assert self._process.exitcode is not None
        return int(self._process.exitcode)

    @property
    def display(self) -> list[str]:
        """The lines of the screen now, without the empty ones at its end."""
        lines = [line.rstrip() for line in self.screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def text(self) -> list[str]:
        """All lines: those that have left the screen at its top, and those on it."""
        rows = self.screen.history.top
        gone = ["".join(row[at].data for at in range(self.screen.columns)).rstrip() for row in rows]
        return [*gone, *self.display]

    def _show(self) -> bool:
        """Take up what is there; return whether there was anything."""
        ready, _, _ = select.select([self._master], [], [], 0.05)
        if not ready:
            return False
        data = os.read(self._master, 1 << 16)
        self.raw += data
        self._stream.feed(data)
        self.frames.append(self.display)
        return True


def _attach(terminal: str) -> None:
    """Make a terminal this process's own, and its standard streams."""
    os.setsid()
    descriptor = os.open(terminal, os.O_RDWR)
    for number in range(3):
        os.dup2(descriptor, number)
    sys.stdin = os.fdopen(0, "r")
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8")
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8")
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _forked(
    terminal: str, folder: str, environment: dict[str, str], arguments: tuple[str, ...]
) -> None:
    _attach(terminal)
    call_pipe(folder, environment, arguments)


def _real(
    terminal: str, folder: str, environment: dict[str, Any], arguments: tuple[str, ...]
) -> None:
    _attach(terminal)
    os.chdir(folder)
    os.execve(sys.executable, [sys.executable, "-m", "pipetrain", *arguments], environment)

"""Logs of a run: rank 0 writes to the screen, and every rank to its own file; rank 0's long work is
in `activity.json` of the run's folder, too."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import click

from pipeline.errors import StageError, in_words
from pipeline.utils import terminal
from pipeline.utils.activities import Activity
from pipeline.utils.files import opened, private_folder, replace_text
from pipeline.utils.terminal import ShownFormatter, bare, shown

IN_DISPLAY = {"in_display": True}
"""`extra` of a log message whose facts a live display shows by itself."""
LIBRARIES = ("py.warnings", "torchao", "torch.utils._pytree")
"""Loggers on which libraries warn each other, and report kernels that were not built. They do not
write to the screen."""
COMPILERS = ("torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes")
"""Loggers of torch's compiler, each with its own handler, which writes to the screen."""


def say(text: str) -> None:
    """Print a line of the launching process, unless only warnings and errors are wanted."""
    if "quiet" not in terminal.shows:
        click.echo(text)


def open_log(run_dir: Path, rank: int) -> IO[str]:
    """Open a rank's log to append to it. Raises StageError."""
    try:
        return opened(private_folder(run_dir / "logs") / f"rank-{rank:05d}.log", "a")
    except OSError as error:
        raise StageError(in_words(error)) from error


@contextlib.contextmanager
def rank_log(run_dir: Path, rank: int, display: str = "") -> Iterator[logging.Logger]:
    """The run's logger: rank 0 writes to the screen, as the words `display` say (`set_display`),
    every rank to its own file. Everything else that ranks above 0 print goes to their file too.
    Raises StageError."""
    log = logging.getLogger("pipe")
    with contextlib.ExitStack() as stack:

        def close() -> None:
            with contextlib.suppress(OSError):  # a full disk has been reported
                file.close()

        file = open_log(run_dir, rank)
        stack.callback(close)
        screen = os.dup(2)  # what is printed elsewhere may go to the same file
        stack.callback(os.close, screen)
        to_file, to_screen = _LineHandler(file), _LineHandler(sys.stdout)
        to_file.name, to_screen.name = file.name, "standard output"
        to_file.screen = to_screen.screen = screen
        to_file.setFormatter(ShownFormatter("%(asctime)s %(levelname)s %(message)s"))
        handlers: list[tuple[logging.Logger, logging.Handler]] = []
        handlers += [(logger, to_file) for logger in (log, *map(logging.getLogger, LIBRARIES))]
        stack.callback(logging.captureWarnings, False)
        logging.captureWarnings(True)
        if rank == 0:
            stdout = bare(sys.stdout)
            if isinstance(stdout, io.TextIOWrapper):
                stdout.reconfigure(line_buffering=True)  # where a display shows it, it is a pipe
            words = display.split()
            level = logging.WARNING if "quiet" in words else logging.INFO
            to_screen.setLevel(logging.DEBUG if "verbose" in words else level)
            if "live" in words:
                to_screen.addFilter(lambda record: not getattr(record, "in_display", False))
            handlers.append((log, to_screen))
        else:
            for descriptor in (1, 2):  # also what native libraries print
                saved = os.dup(descriptor)
                stack.callback(os.close, saved)
                stack.callback(_point_at, saved, descriptor)
                _point_at(file.fileno(), descriptor)
        for logger, handler in handlers:
            stack.callback(logger.setLevel, logger.level)
            stack.callback(setattr, logger, "propagate", logger.propagate)
            stack.callback(logger.removeHandler, handler)
            logger.addHandler(handler)
            logger.propagate = False
        log.setLevel(logging.DEBUG)
        yield log


def _point_at(target: int, descriptor: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk
            stream.flush()
    os.dup2(target, descriptor)


class _LineHandler(logging.StreamHandler[Any]):
    """Writes records to a stream. When that takes no more, it says so once, and continues trying:
    `logging` would print two stacks for each record. Its name is the stream's."""

    screen = 2
    """Descriptor where a failure is reported."""
    reported = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Say why a record cannot be written, if the system is the reason."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.reported:
            self.reported = True
            text = shown(f"{self.name} lacks lines from here on: {error.strerror or error}")
            with contextlib.suppress(OSError):
                os.write(self.screen, f"{text}\n".encode())


@contextlib.contextmanager
def compilers_aside(log: logging.Logger) -> Iterator[None]:
    """Have torch's compiler write to the rank's file only, unless TORCH_LOGS asks for more on the
    screen. For after the first import of torch, which installs the handlers."""
    with contextlib.ExitStack() as stack:
        for name in () if os.environ.get("TORCH_LOGS") else COMPILERS:
            compiler = logging.getLogger(name)
            stack.callback(setattr, compiler, "handlers", compiler.handlers)
            compiler.handlers = log.handlers[:1]
        yield


ACTIVITY_FILE = "activity.json"
WRITE_SECONDS = 1.0
"""Seconds between two writes of the file."""
LOG_SECONDS = 10.0
"""Seconds between two lines in the log, and before the first."""


@dataclass(eq=False)
class ActivityRecord:
    """Shows a rank's newest activity: in its log, and in the run's folder if it is given one."""

    log: logging.Logger
    folder: Path | None
    _under_way: list[Activity] = field(default_factory=list, init=False)
    _written: float = field(default=0.0, init=False)
    _logged: dict[Activity, float] = field(default_factory=dict, init=False)

    def changed(self, activity: Activity) -> None:
        now = time.monotonic()
        if activity not in self._under_way:
            self._under_way.append(activity)
        if activity is not self._under_way[-1]:
            return
        if now - self._logged.setdefault(activity, activity.began) >= LOG_SECONDS:
            self._logged[activity] = now
            self.log.info("%s", activity.describe(), extra=IN_DISPLAY)
        if now - self._written >= WRITE_SECONDS:
            self._written = now
            self._write()

    def ended(self, activity: Activity) -> None:
        if activity in self._under_way:
            self._under_way.remove(activity)
        self._logged.pop(activity, None)
        self._written = 0.0
        self._write()

    def _write(self) -> None:
        """Write the newest activity; remove the file if there is none. It is only for people, so a
        disk that is full or gone ends nothing."""
        if self.folder is None:
            return
        with contextlib.suppress(OSError):
            if self._under_way:
                newest = self._under_way[-1]
                facts = {name: getattr(newest, name) for name in ("name", "done", "total", "unit")}
                text = json.dumps({**facts, "seconds": round(newest.seconds, 3)})
                replace_text(self.folder / ACTIVITY_FILE, text)
            else:
                (self.folder / ACTIVITY_FILE).unlink(missing_ok=True)

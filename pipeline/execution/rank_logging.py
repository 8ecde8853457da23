"""Logs of a run: rank 0 writes to the screen, and every rank to its own file."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import click

from pipeline.errors import StageError, system_errors_as
from pipeline.utils.files import opened, private_folder
from pipeline.utils.terminal import ShownFormatter, bare, display, quiet, shown

IN_DISPLAY = {"in_display": True}
"""`extra` of a log message whose facts a live display shows by itself."""


def say(text: str) -> None:
    """Print a line of the launching process, unless only warnings and errors are wanted."""
    if not quiet():
        click.echo(text)


def open_log(run_dir: Path, rank: int) -> IO[str]:
    """Open a rank's log to append to it. Raises StageError."""
    with system_errors_as(StageError):
        return opened(private_folder(run_dir / "logs") / f"rank-{rank:05d}.log", "a")


@contextlib.contextmanager
def rank_log(run_dir: Path, rank: int) -> Iterator[logging.Logger]:
    """The run's logger: rank 0 writes to the screen, every rank to its own file. Everything else
    that ranks above 0 print goes to their file too."""
    log = logging.getLogger("pipe")
    with contextlib.ExitStack() as stack:
        stack.callback(log.setLevel, log.level)
        stack.callback(setattr, log, "propagate", log.propagate)
        log.setLevel(logging.DEBUG)
        log.propagate = False
        file = open_log(run_dir, rank)
        stack.callback(_close, file)
        screen = os.dup(2)  # what is printed elsewhere may go to the same file
        stack.callback(os.close, screen)
        to_file = _LineHandler(file, file.name, screen)
        to_file.setFormatter(ShownFormatter("%(asctime)s %(levelname)s %(message)s"))
        stack.enter_context(_attached(log, to_file))
        for aside in map(logging.getLogger, ASIDES):
            stack.callback(setattr, aside, "propagate", aside.propagate)
            aside.propagate = False
            stack.enter_context(_attached(aside, to_file))
        stack.callback(logging.captureWarnings, False)
        logging.captureWarnings(True)
        if rank == 0:
            stdout = bare(sys.stdout)
            if isinstance(stdout, io.TextIOWrapper):
                stdout.reconfigure(line_buffering=True)  # where a display shows it, it is a pipe
            handler = _LineHandler(sys.stdout, "standard output", screen)
            words = display().split()
            quiet = logging.WARNING if "quiet" in words else logging.INFO
            handler.setLevel(logging.DEBUG if "verbose" in words else quiet)
            if "live" in words:
                handler.addFilter(lambda record: not getattr(record, "in_display", False))
            stack.enter_context(_attached(log, handler))
        else:
            stack.enter_context(_output_to(to_file.stream))
        yield log


COMPILERS = ("torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes")
"""Loggers of torch's compiler, each with its own handler, which writes to the screen."""


@contextlib.contextmanager
def compilers_aside(log: logging.Logger) -> Iterator[None]:
    """Have torch's compiler write to the rank's file only, unless TORCH_LOGS asks for more on the
    screen. For after the first import of torch, which installs the handlers."""
    to_file = log.handlers[0]
    with contextlib.ExitStack() as stack:
        for name in () if os.environ.get("TORCH_LOGS") else COMPILERS:
            compiler = logging.getLogger(name)
            stack.callback(setattr, compiler, "handlers", compiler.handlers)
            compiler.handlers = [to_file]
        yield


class _LineHandler(logging.StreamHandler[Any]):
    """Writes records to a stream. When that takes no more, it says so once, and continues trying:
    `logging` would print two stacks for each record."""

    def __init__(self, stream: Any, name: str, screen: int) -> None:
        """`name` is the stream's; `screen` the descriptor where its failure is reported."""
        super().__init__(stream)
        self._stream_name, self._screen, self._told = name, screen, False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Say why a record cannot be written, if the system is the reason."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._told:
            self._told = True
            text = shown(f"{self._stream_name} lacks lines from here on: {error.strerror or error}")
            with contextlib.suppress(OSError):
                os.write(self._screen, f"{text}\n".encode())


def _close(file: IO[str]) -> None:
    """Close a log. A disk that took no more has been reported, and does not fail the run."""
    with contextlib.suppress(OSError):
        file.close()


ASIDES = ("py.warnings", "torchao", "torch.utils._pytree")
"""Loggers on which libraries warn each other, and report kernels that were not built. They do not
write to the screen."""


def quiet_loggers() -> None:
    """Keep the loggers of ASIDES off the screen of a command without a log. With a handler of their
    own, logging does not fall back to printing them."""
    for aside in map(logging.getLogger, ASIDES):
        if not aside.handlers:
            aside.addHandler(logging.NullHandler())


@contextlib.contextmanager
def _attached(log: logging.Logger, handler: logging.Handler) -> Iterator[None]:
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


@contextlib.contextmanager
def _output_to(file: IO[str]) -> Iterator[None]:
    """Standard output and error of this process, native libraries' included, end up in `file`."""
    saved = [os.dup(descriptor) for descriptor in (1, 2)]
    _point_output_at(file.fileno(), file.fileno())
    try:
        yield
    finally:
        _point_output_at(*saved)
        for descriptor in saved:
            os.close(descriptor)


def _point_output_at(stdout: int, stderr: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk
            stream.flush()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)

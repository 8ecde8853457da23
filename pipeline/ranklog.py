"""One voice on screen, and everything in files: rank 0 speaks, every rank writes its own log."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path


def log_file(run_dir: Path, rank: int) -> Path:
    """Where a rank's output goes; its folder is there when this returns."""
    folder = run_dir / "logs"
    folder.mkdir(exist_ok=True)
    return folder / f"rank-{rank:05d}.log"


@contextlib.contextmanager
def rank_log(run_dir: Path, rank: int) -> Iterator[logging.Logger]:
    """The run's logger: rank 0 speaks on screen, every rank writes its own file.

    Other ranks' raw output goes to their file too, whatever prints it.
    """
    path = log_file(run_dir, rank)
    log = logging.getLogger("pipe")
    log.setLevel(logging.DEBUG)
    log.propagate = False
    with contextlib.ExitStack() as stack:
        to_file = logging.FileHandler(path, encoding="utf-8")
        to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        stack.enter_context(_attached(log, to_file))
        stack.enter_context(_warnings_to(to_file))
        if rank == 0:
            to_screen = logging.StreamHandler(sys.stdout)
            to_screen.setLevel(logging.INFO)
            stack.enter_context(_attached(log, to_screen))
        else:
            stack.enter_context(_output_to(path))
        yield log


ASIDES = ("py.warnings", "torchao", "torch.utils._pytree")
"""Loggers of what libraries tell each other: warnings, and which kernels were not built."""


@contextlib.contextmanager
def _warnings_to(handler: logging.Handler) -> Iterator[None]:
    """What is nearly all from one library to another stays off the screen."""
    warned = [logging.getLogger(name) for name in ASIDES]
    propagated = [one.propagate for one in warned]
    for one in warned:
        one.propagate = False
        one.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for one, propagates in zip(warned, propagated, strict=True):
            one.removeHandler(handler)
            one.propagate = propagates


@contextlib.contextmanager
def _attached(log: logging.Logger, handler: logging.Handler) -> Iterator[None]:
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Standard output and error of this process, native libraries' included, end up in `path`."""
    saved = [os.dup(descriptor) for descriptor in (1, 2)]
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    _point_output_at(file, file)
    os.close(file)
    try:
        yield
    finally:
        _point_output_at(*saved)
        for descriptor in saved:
            os.close(descriptor)


def _point_output_at(stdout: int, stderr: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)

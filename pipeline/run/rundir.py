"""The run's folder: its names, its creation, and the lock that keeps a second process out.

recipe.yaml      the merged recipe; `pipe resume` reads it
environment.json versions and command of the newest start; the journal has those of every start
engine.json      what really ran
journal.jsonl    stages started, finished, failed
metrics.jsonl    one record a step
memory.json      what training took of a GPU's memory
logs/            rank-N.log
failures/        rank-N.json and rank-N.txt (the traceback) of the newest failure
checkpoints/     step-NNNNNNNN
checkpoints.at   where they are
export/          the exported model
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from pipeline.checkpoint import location
from pipeline.errors import RunLocked, UsageError, in_words, system_errors_as
from pipeline.utils.files import naming, opened

RECIPE = location.RECIPE
JOURNAL = "journal.jsonl"
METRICS = "metrics.jsonl"
LEFT = ("checkpoints", "checkpoints.at", JOURNAL, METRICS)
"""Left by a run, and taken by a new one in the same folder for its own."""
LOCK = "lock"
LOCK_SECONDS = 1.0
"""Seconds to ask for the lock before another process is taken to hold it."""


def create(root: Path, name: str) -> Path:
    """A new folder `root/NAME-TIME`, readable by its owner only; UsageError if it cannot be."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder, attempt = root / f"{name}-{stamp}", 1
    while True:
        try:
            return _made(folder, exist_ok=False)
        except UsageError:
            if not folder.exists():
                raise
        attempt += 1
        folder = root / f"{name}-{stamp}-{attempt}"


def claim(folder: Path) -> Path:
    """Use `folder`, given by the user, for a new run. Raises UsageError if it already holds one, or
    what one has left, from which the new run would go on."""
    if (folder / RECIPE).exists():
        raise UsageError(f"{folder} already holds a run", hint=f"continue it: pipe resume {folder}")
    left = next((name for name in LEFT if (folder / name).exists()), None)
    if left is not None:
        raise UsageError(
            f"{folder} holds {left} of another run, and no {RECIPE}",
            hint="name a new folder; to start from a checkpoint in this one, name that as the "
            "checkpoint slot's start_from",
        )
    return _made(folder, exist_ok=True)


def _made(folder: Path, *, exist_ok: bool) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok, mode=0o700)
    except OSError as error:
        raise UsageError(f"cannot create {folder}: {error.strerror}") from error
    return folder


def existing(folder: Path) -> Path:
    """`folder` if it holds a run; raises UsageError if not."""
    if not (folder / RECIPE).is_file():
        raise UsageError(
            f"{folder} is not a run folder: it holds no {RECIPE}", hint="pipe ls shows runs"
        )
    return folder


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the run's lock. The system frees it when its owner dies, however it dies.

    Raises RunLocked while another live process holds it, UsageError if there can be no lock.
    """
    try:
        file = opened(folder / LOCK, "a+")
    except OSError as error:
        raise UsageError(f"cannot write in {folder}: {in_words(error)}") from error
    with file:
        if not _acquired(file):
            file.seek(0)
            owner = file.read().strip() or "another process"
            raise RunLocked(f"{folder} is in use by {owner}")
        with system_errors_as(UsageError), naming(folder / LOCK):
            file.truncate(0)
            os.write(file.fileno(), f"process {os.getpid()} on {platform.node()}\n".encode())
        yield


def _acquired(file: IO[str]) -> bool:
    # A dying owner, and `pipe ls` looking, hold the lock for a moment.
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        except OSError as error:
            raise UsageError(f"cannot lock {file.name}: {error.strerror}") from error
        else:
            return True


def is_locked(folder: Path) -> bool:
    """Whether a live process works in this run folder."""
    path = folder / LOCK
    if not path.exists():
        return False
    with path.open("r", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False

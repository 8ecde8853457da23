"""Points of a run at which a process can die or the system can refuse: operations on files of the
run's folder, and starts of processes, found by instrumenting them.

`install_from_environment` is called in the launcher's process before it forks its ranks, and by
`sitecustomize.py` in the writers. Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

VARIABLE = "TEST_POINT"
EVENTS = (
    "open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.fork",
    "subprocess.Popen",
)  # fmt: skip
"""Python's audit events that count."""
CALLS = ("pwrite", "write", "fsync", "posix_fallocate")
"""Functions of `os` that count, on files of the folder."""
STARTS = ("os.fork", "subprocess.Popen")
READ = "open to read"


@dataclasses.dataclass(frozen=True)
class Point:
    """An operation of a process: the n-th of its kind, since how often a file is read differs
    between runs. `role` is launcher, rank N or writer N."""

    role: str
    kind: str
    number: int


@dataclasses.dataclass(kw_only=True)
class Plan:
    """Where to act, and how. Without a point, all are written to `log`."""

    root: str
    """The run's folder."""
    fired: str
    """File that is made when the fault has happened, so that it does once."""
    log: str = ""
    role: str = ""
    kind: str = ""
    number: int = -1
    how: str = "kill"
    """`kill`, or the name of an errno with which the operation fails."""


def install_from_environment() -> None:
    """Instrument this process and those that it forks, if VARIABLE says so."""
    if VARIABLE in os.environ:
        counter = _Counter(Plan(**json.loads(os.environ[VARIABLE])))
        os.register_at_fork(after_in_child=counter.begin)
        sys.addaudithook(counter.hear)
        for name in CALLS:
            setattr(os, name, counter.wrap(name, getattr(os, name)))


SITECUSTOMIZE = """\
import sys
if "pipeline.checkpoint.writer" in sys.orig_argv:
    from tests.support.points import install_from_environment
    install_from_environment()
"""


class _Counter:
    """Counts the operations of this process."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._busy = False
        self._log = os.open(plan.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT) if plan.log else None
        self.begin()

    def begin(self) -> None:
        """Count from 0, in a new process."""
        self._counts: dict[str, Iterator[int]] = defaultdict(itertools.count)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Handle an audit event."""
        if event in EVENTS and not self._busy and self._concerns(event, arguments):
            reads = event == "open" and not _writes(*arguments[1:])
            self._pass(READ if reads else event)

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return an `os` function that counts."""

        def counted(descriptor: int, *rest: Any) -> Any:
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{descriptor}").startswith(self._plan.root):  # noqa: PTH115
                    self._pass(name)
            return real(descriptor, *rest)

        return counted

    def _concerns(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event in STARTS:
            return True
        place = arguments[0]
        return isinstance(place, str | Path) and str(place).startswith(self._plan.root)

    def _pass(self, kind: str) -> None:
        plan, here = self._plan, Point(role(), kind, next(self._counts[kind]))
        if self._log is not None:
            line = json.dumps(dataclasses.astuple(here)) + "\n"
            _write(self._log, line.encode())
            return
        if here != Point(plan.role, plan.kind, plan.number) or not self._first():
            return
        if plan.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        code = getattr(errno, plan.how)
        raise OSError(code, os.strerror(code), f"{plan.root}/...")

    def _first(self) -> bool:
        self._busy = True
        try:
            os.close(os.open(self._plan.fired, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        finally:
            self._busy = False
        return True


def _writes(mode: object, flags: int | None) -> bool:
    """Return whether a file is opened to be written."""
    asked = isinstance(mode, str) and bool(set(mode) & set("wax+"))
    return asked or bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


_write = os.write


def role() -> str:
    """Return which process of a run this is."""
    if "pipeline.checkpoint.writer" in sys.orig_argv:
        return f"writer {os.environ['RANK']}"
    return f"rank {os.environ['RANK']}" if "RANK" in os.environ else "launcher"

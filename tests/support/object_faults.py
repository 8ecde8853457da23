"""Faults at the requests to an object store, and a writer over HTTP in its own process.

`python -m tests.support.object_faults` reads a pickled Task from standard input and prints the
outcome.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
import signal
import subprocess
import sys
from typing import Any

from fsspec import get_filesystem_class

from pipeline.checkpoint import object_store
from pipeline.checkpoint.writer_main import carry_out
from tests.support.injection import Fault
from tests.support.sweep import REPOSITORY
from tests.support.tiny_store import Tiny, job

REQUESTS = ("makedirs", "open", "pipe_file", "rm", "rm_file")


def install(fault: Fault) -> None:
    """Kill this process `before` or `after` request number `fault.at`."""
    counter = _Counter(fault)
    scheme = fault.root.partition("://")[0]
    places: list[tuple[Any, str]] = [(get_filesystem_class(scheme), name) for name in REQUESTS]
    places += [(object_store._Object, name) for name in ("write", "finish")]
    for owner, name in places:
        setattr(owner, name, counter.wrap(name, getattr(owner, name)))


class _Counter:
    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._count = 0
        self._inside = False

    def wrap(self, name: str, real: Any) -> Any:
        @functools.wraps(real)
        def patched(owner: Any, *rest: Any, **named: Any) -> Any:
            if self._inside or (name == "open" and "wb" not in rest):  # this is a poll
                return real(owner, *rest, **named)
            self._die_if("before")
            self._inside = True
            try:
                return real(owner, *rest, **named)
            finally:
                self._inside = False
                self._end(f"{name} {rest[0] if rest and isinstance(rest[0], str) else ''}")

        return patched

    def _end(self, line: str) -> None:
        if self._fault.log:
            with open(self._fault.log, "a") as file:  # noqa: PTH123
                file.write(line.strip() + "\n")
        self._die_if("after")
        self._count += 1

    def _die_if(self, how: str) -> None:
        if (self._count, how) == (self._fault.at, self._fault.how):
            os.kill(os.getpid(), signal.SIGKILL)


@dataclasses.dataclass
class Task:
    """One rank's part of a save."""

    tiny: Tiny
    step: int
    identity: str
    rank: int
    fault: Fault | None = None


def start(task: Task) -> subprocess.Popen[bytes]:
    """Start the writer."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.object_faults"], cwd=REPOSITORY,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(pickle.dumps(task))
    process.stdin.close()
    return process


def main() -> None:
    task: Task = pickle.load(sys.stdin.buffer)  # noqa: S301
    if task.fault is not None:
        install(task.fault)
    setup = task.tiny.setups[task.rank]
    arena = task.tiny.arena(task.rank, task.step)
    print(carry_out(setup, job(task.step, task.identity), arena).model_dump_json())


if __name__ == "__main__":
    from tests.support import object_faults as this

    this.main()

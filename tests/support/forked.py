"""Ranks forked from a process that has torch imported, because importing it takes each six seconds,
and their writers.

`Pipe.start` starts commands and ranks as users do, and so does the full tier for a Pipe that
`starts`: in the tests of faults, of the quickstart and of the tutorial.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.distributed.signals import ENDING, signals_blocked
from pipeline.utils import processes
from tests.support import injection, points
from tests.support.tier import FULL


def fork_children() -> None:
    """Have this process fork the ranks and writers that it starts."""
    processes.subprocess = Children  # type: ignore[assignment,attr-defined]


class ForkedChild:
    """The part of subprocess.Popen that ranks and writers need: a child without `exec`."""

    def __init__(self, main: Callable[[], int | None]) -> None:
        self.returncode: int | None = None
        with signals_blocked():  # a child without `exec` would handle them as its parent does
            self.pid = os.fork()
            if self.pid == 0:
                _be(main)

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code."""
        deadline = time.monotonic() + timeout if timeout is not None else float("inf")
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked child", timeout or 0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        """Request the end."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkedRank(ForkedChild):
    """`python -P -m pipeline.execution.worker ARGUMENTS`."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: int | None = None,
        **_: Any,
    ) -> None:
        def main() -> int:
            if stdout is not None:
                os.dup2(stdout, 1)
                os.dup2(stdout, 2)
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number in set(ENDING) - {signal.SIGINT}:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
            os.environ.clear()
            os.environ.update(env)
            from pipeline.execution import worker

            return worker.main(list(arguments))

        super().__init__(main)


class ForkedWriter(ForkedChild):
    """`python -P -m pipeline.checkpoint.writer ARGUMENT`, between two pipes."""

    def __init__(self, argument: str) -> None:
        (requests, ours), (theirs, answers) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(ours, "wb"), os.fdopen(theirs, "rb")

        def main() -> None:
            for stream in (self.stdin, self.stdout):
                stream.close()  # or the input would never end
            for number, descriptor in enumerate((requests, answers)):
                os.dup2(descriptor, number)
            self._theirs = sys.stdin, sys.stdout  # which would close 0 and 1 when nobody holds them
            sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
            gc.disable()  # it would copy the memory of the rank
            from pipeline.checkpoint import writer

            writer.main(argument)

        super().__init__(main)
        for descriptor in (requests, answers):
            os.close(descriptor)


RANK, WRITER = "pipeline.execution.worker", "pipeline.checkpoint.writer"
FAULTS = {injection.VARIABLE, points.VARIABLE}
"""Variables that make a started writer fail."""


def _popen(command: Sequence[str], **options: Any) -> Any:
    """Fork a rank, and a writer in the quick tier; start anything else."""
    if RANK in command:
        return ForkedRank(command[command.index(RANK) + 1 :], **options)
    if WRITER in command and not FULL and FAULTS.isdisjoint(os.environ):
        return ForkedWriter(command[-1])
    return subprocess.Popen(command, **options)


class Children:
    """Replaces the module `subprocess`."""

    Popen = staticmethod(_popen)
    PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired


def _be(main: Callable[[], int | None]) -> None:
    """Run `main` to its end, in the child."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        code = main() or 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)

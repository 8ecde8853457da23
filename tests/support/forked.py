"""Ranks forked from a process that has torch imported, because importing it takes each six seconds.

`Pipe.start` starts commands and ranks as users do, and so does the full tier for a Pipe that
`starts`: in the tests of faults, of the quickstart and of the tutorial.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.distributed.signals import ENDING, signals_blocked


def fork_ranks() -> None:
    """Have this process fork the ranks that it starts."""
    from pipeline.utils import processes

    processes.subprocess = Ranks  # type: ignore[attr-defined]


class ForkedRank:
    """The part of subprocess.Popen that the launcher uses."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: int | None = None,
        **_: Any,
    ) -> None:
        self.returncode: int | None = None
        with signals_blocked():  # a child without `exec` would handle them as its parent does
            self.pid = os.fork()
            if self.pid == 0:
                for stream in (1, 2) if stdout is not None else ():
                    os.dup2(stdout, stream)
                _become(command[command.index("pipeline.execution.worker") + 1 :], env)

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
                raise subprocess.TimeoutExpired("a forked rank", timeout or 0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        """Request the end."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


def _popen(command: Sequence[str], **options: Any) -> Any:
    """Fork a rank, and start anything else."""
    rank = "pipeline.execution.worker" in command
    return ForkedRank(command, **options) if rank else subprocess.Popen(command, **options)


class Ranks:
    """Replaces the module `subprocess`."""

    Popen = staticmethod(_popen)
    DEVNULL = subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired


def _become(arguments: Sequence[str], env: Mapping[str, str]) -> None:
    """Run `python -P -m pipeline.execution.worker ARGUMENTS` to its end, in the child."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in set(ENDING) - {signal.SIGINT}:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        os.environ.clear()
        os.environ.update(env)
        from pipeline.execution import worker

        code = worker.main(list(arguments))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)

"""Child processes: started with a message, and ended with their parent and their own children.

`python -m pipeline.utils.processes PARENT COMMAND...` runs a command that ends with the process
PARENT, and with it everything that it has started: ninja puts compilers in separate process groups,
so whoever kills a rank or its launcher does not reach them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from pipeline.utils.files import memory_file

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
REAP_SECONDS = 5.0
GRACE = "--outlives="
"""Last argument of a process that ends by itself, with the seconds by which it may outlive the one
that started it."""


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs one of the project's modules in a new process, whatever modules of the
    same name lie in the current folder or on PYTHONPATH."""
    return [sys.executable, "-P", "-m", "pipetrain", "-m", module, *arguments]


def start_child(
    module: str, message: Any, *shown: str, pass_fds: Sequence[int] = (), **options: Any
) -> subprocess.Popen[bytes]:
    """Start a module of the project, which finds `message`, a JSON value, by `received`. `ps` shows
    the arguments `shown`, such as the run's folder. `options` are Popen's. Raises OSError."""
    with os.fdopen(memory_file("message"), "wb") as file:
        file.write(json.dumps({"parent": os.getpid(), "message": message}).encode())
        file.flush()
        command = module_command(module, str(file.fileno()), *shown)
        return subprocess.Popen(command, pass_fds=[*pass_fds, file.fileno()], **options)


def received(argument: str, *, ends_with_parent: bool = False) -> Any:
    """The message to this process, whose first argument is `argument`. It `ends_with_parent`, the
    process that has sent it, if so asked."""
    with os.fdopen(int(argument), "rb") as file:
        file.seek(0)  # where the sender's position was
        sent = json.load(file)
    if ends_with_parent:
        die_with(sent["parent"])
    return sent["message"]


def die_with(parent: int) -> None:
    """Ask Linux to kill this process when its parent, process `parent`, dies; exit if it has."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it may have died before the request
        os._exit(1)


def ended_with_this(command: Sequence[str]) -> list[str]:
    """The command so that it ends with this process, however that ends, and with it everything that
    it has started. It should lead a session, and be asked to end by SIGTERM."""
    return module_command("pipeline.utils.processes", str(os.getpid()), *command)


def _run_until_end_of(parent: int, command: Sequence[str]) -> int:
    """Run the command until it or process `parent` ends. Returns the exit code."""
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def leave(number: int, frame: FrameType | None) -> None:
        for other in ending:
            signal.signal(other, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in ending:
        signal.signal(number, leave)
    # asked to end, and not killed: what it has started ends, too
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
    with kill_descendants():
        # `kill_descendants` finds what is in another session
        code = subprocess.Popen(command, start_new_session=True).wait()
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def kill_descendants(waiting: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Kill what the body started in other sessions (ranks have their own) and left running, once
    those with GRACE have had their time, in which `waiting` is called now and then.

    Descendants whose parent died are found too: they become children of this process.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        try:
            began = time.monotonic()
            while any(time.monotonic() - began < _grace(child) for child in _children_elsewhere()):
                waiting()
                time.sleep(0.05)
        finally:
            # A child's own children become ours when it dies, so this repeats until there are none.
            deadline = time.monotonic() + REAP_SECONDS
            while (children := _children_elsewhere()) and time.monotonic() < deadline:
                for child in children:
                    with contextlib.suppress(ProcessLookupError, ChildProcessError):
                        os.kill(child, signal.SIGKILL)
                        os.waitpid(child, os.WNOHANG)
                time.sleep(0.02)
            prctl(PR_SET_CHILD_SUBREAPER, 0)


def kill_sessions(leaders: Iterable[subprocess.Popen[bytes]]) -> None:
    """Kill processes that lead sessions, with their groups, and wait for them."""
    for process in leaders:
        # the number of a group that has ended may have been given to another by now
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _grace(process: int) -> float:
    """Seconds that the process was given when it was started; 0 for one that has ended."""
    with contextlib.suppress(OSError, ValueError):
        *_, last, _ = Path(f"/proc/{process}/cmdline").read_text().split("\0")
        return float(last.removeprefix(GRACE)) if last.startswith(GRACE) else 0.0
    return 0.0


def _children_elsewhere() -> list[int]:
    """Children of this process that are not in its session."""
    me, session = os.getpid(), os.getsid(0)
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # after the name in brackets: state, parent, process group, session
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == me and int(fields[3]) != session:
                found.append(int(folder.name))
    return found


if __name__ == "__main__":
    sys.exit(_run_until_end_of(int(sys.argv[1]), sys.argv[2:]))

"""`pipe` in real processes, with more stages installed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.forked import fork_children
from tests.support.points import install_from_environment
from tests.support.processes import forking
from tests.support.tier import FULL
from tests.support.waiting import becomes

REPOSITORY = Path(__file__).parent.parent.parent


LIMIT = 300
"""Time limit in seconds. Commands of these tests take less than a tenth of it, unless the machine
has other work."""
STREAMS = ("stdout", "stderr")
FOR_RANKS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
)  # fmt: skip
"""Variables that a process group in this process may have left."""


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """Result of a command."""

    code: int
    stdout: str
    stderr: str
    seconds: float


class Forked:
    """A command that runs in a forked process."""

    def __init__(self, process: Any, place: Path) -> None:
        self._process, self._place = process, place
        self._began = time.monotonic()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def send(self, number: int) -> None:
        """Send a signal to it, if it is alive."""
        if self._process.exitcode is None:
            os.kill(self._process.pid, number)

    def alive(self) -> bool:
        """Return whether it has not ended."""
        return self._process.exitcode is None

    def end(self) -> Outcome:
        """Wait for its end."""
        self._process.join(LIMIT)
        assert self._process.exitcode is not None, "the command has not ended"
        files = [self._place / name for name in STREAMS]  # none, if it was killed before it began
        said, wrong = (file.read_text() if file.exists() else "" for file in files)
        seconds = time.monotonic() - self._began
        return Outcome(code=self._process.exitcode, stdout=said, stderr=wrong, seconds=seconds)


class Pipe:
    """`pipe` in its own processes; with `starts` the full tier starts them, and does not fork."""

    def __init__(self, plugin: Path, folder: Path, *, starts: bool = False) -> None:
        self.folder, self._starts = folder, starts
        self.run_dir = folder / "the run"
        path = os.pathsep.join([str(plugin), str(REPOSITORY)])
        self.environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        for name in FOR_RANKS:
            self.environment.pop(name, None)

    def recipe(
        self, *, procs: int = 1, launch: Mapping[str, Any] | None = None, **slots: Mapping[str, Any]
    ) -> Path:
        """Write a recipe; arguments such as `export=dict(fault="raise")` add fields to the usual
        chain's slots. Without `launch`, a failed run is not started again."""
        chain: dict[str, dict[str, Any]] = {
            slot: {"use": f"fault.{slot}"} for slot in ("declare", "train", "export", "report")
        }
        for slot, fields in slots.items():
            chain[slot] |= fields
        path = self.folder / "recipe.yaml"
        launch = {"procs": procs, "device": "cpu", **(launch or {"restarts": {"limit": 0}})}
        path.write_text(json.dumps({"name": "faulty", "launch": launch, "stages": chain}))
        return path

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command of this Python."""
        return subprocess.Popen(
            [sys.executable, *command], text=True, cwd=self.folder,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self.environment | environment,
        )  # fmt: skip

    def end(self, process: subprocess.Popen[str], limit: float = LIMIT) -> Outcome:
        """Wait for a command."""
        began = time.monotonic()
        stdout, stderr = process.communicate(timeout=limit)
        seconds = time.monotonic() - began
        return Outcome(code=process.returncode, stdout=stdout, stderr=stderr, seconds=seconds)

    def __call__(self, *arguments: str, **environment: str) -> Outcome:
        """Run `pipe ARGUMENTS` to its end; it and its ranks are forked, unless they are started."""
        if FULL and self._starts:
            return self.end(self.start("-m", "pipetrain", *arguments, **environment))
        with tempfile.TemporaryDirectory() as place:
            return self.fork(Path(place), *arguments, **environment).end()

    def fork(self, place: Path, *arguments: str, **environment: str) -> Forked:
        """Start `pipe ARGUMENTS` forked, as its ranks are, with its output in `place`."""
        work = (str(place), str(self.folder), self.environment | environment, arguments)
        process = forking().Process(target=_pipe, args=work)
        process.start()
        return Forked(process, place)

    def run(self, recipe: Path, **environment: str) -> Outcome:
        """Run `pipe run` in the run folder of this test."""
        return self("run", str(recipe), "--run-dir", str(self.run_dir), **environment)

    def calls(self) -> list[str]:
        """Return the calls of stages: runs and closes."""
        return (self.run_dir / "calls.txt").read_text().splitlines()

    def events(self) -> list[dict[str, Any]]:
        lines = (self.run_dir / "journal.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def processes(self) -> list[str]:
        """Return the command lines of live processes that name the run folder."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if str(self.run_dir) in line:
                    found.append(line)
        return found

    def wait_for(self, condition: Callable[[], object], limit: float = LIMIT) -> None:
        """Wait until the condition is true."""
        assert becomes(condition, limit)


class ForkedPopen:
    """A forked `pipe`, as the part of subprocess.Popen that `pipeline.api` uses."""

    def __init__(self, command: Sequence[str], **_: Any) -> None:
        self._place = tempfile.TemporaryDirectory()
        for name in STREAMS:
            os.mkfifo(Path(self._place.name, name))
        environment = {name: value for name, value in os.environ.items() if name not in FOR_RANKS}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        arguments = tuple(command[command.index("pipetrain") + 1 :])
        work = (self._place.name, str(Path.cwd()), environment, arguments)
        self._process = forking().Process(target=_pipe, args=work)
        self._process.start()
        self.stdout, self.stderr = map(open, (Path(self._place.name, name) for name in STREAMS))

    def __enter__(self) -> ForkedPopen:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdout, self.stderr):
            stream.close()
        self._place.cleanup()

    def wait(self) -> None:
        self._process.join(LIMIT)
        assert self._process.exitcode is not None, "the command has not ended"

    @property
    def returncode(self) -> int:
        """Its exit code, once it has ended."""
        return int(self._process.exitcode)

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)


def _pipe(place: str, folder: str, environment: dict[str, str], arguments: tuple[str, ...]) -> None:
    """Run `python -m pipetrain ARGUMENTS` in `folder`, in the child, with its output in `place`."""
    for number, name in enumerate(STREAMS, 1):
        os.dup2(os.open(Path(place, name), os.O_WRONLY | os.O_CREAT, 0o600), number)
    call_pipe(folder, environment, arguments)


def call_pipe(folder: str, environment: dict[str, str], arguments: tuple[str, ...]) -> None:
    """Be `python -m pipetrain ARGUMENTS` in `folder`, in a forked process."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = ["pipe", *arguments]
    from pipeline.cli import main

    fork_children()
    install_from_environment()
    main()

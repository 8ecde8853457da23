"""Start the measured processes, watch their memory, and collect their results."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apart.footprint import Footprint, footprint

BENCHMARKS = Path(__file__).parents[1]
LOOK = 0.01
"""Seconds between two measurements of the processes' memory."""
TAIL = 3000
"""Characters of a failed process's log that are shown."""


class Failed(Exception):
    """A process ended early or took too long; the text has the ends of all logs."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Resources that one process used. Memory in bytes."""

    seconds: float
    cpu: float
    """Processor time of all its threads, in seconds."""
    read: int
    """Bytes that read calls returned; pages of mapped files do not count."""
    idle: Footprint
    """Memory before the call, with everything imported."""
    peak: Footprint
    """Peak during the call; `anon` is sampled every few milliseconds."""
    found: Mapping[str, Any]

    @property
    def grown(self) -> Footprint:
        """Return the peak less the memory before the call."""
        return Footprint(*(most - idle for most, idle in zip(self.peak, self.idle, strict=True)))


def measure(
    task: str,
    job: Mapping[str, Any],
    *,
    scratch: Path,
    world: int = 1,
    env: Mapping[str, str] | None = None,
    limit: float = 3600.0,
    before: Callable[[], object] = lambda: None,
) -> list[Part]:
    """Call `MODULE:FUNCTION` with the job in `world` processes, then `before` here, then measure
    the call that each function returned. Return the results in rank order. Raises Failed."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        children = [
            _Child(task, job, rank, world, Path(folder), env or {}) for rank in range(world)
        ]
        try:
            idle = _all(children, limit)
            before()
            _go(children)
            measured = _all(children, limit, watch=True)
            _go(children)
            found = _all(children, limit)
        except Failed as error:
            raise Failed(f"{task}: {error}\n{_logs(Path(folder))}") from None
        finally:
            for child in children:
                child.end()
    told = zip(children, idle, measured, found, strict=True)
    return [_part(child.anon, *lines) for child, *lines in told]


def bare(scratch: Path) -> Footprint:
    """Return the memory of an interpreter that has imported nothing."""
    process = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=scratch,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        process.stdout.readline()
        found = footprint(process.pid)
    finally:
        process.kill()
        process.communicate()
    assert found is not None
    return found


class _Child:
    def __init__(
        self, task: str, job: Mapping[str, Any], rank: int, world: int, folder: Path,
        env: Mapping[str, str],
    ) -> None:  # fmt: skip
        order = {
            "task": task, "job": job, "rank": rank, "world": world, "folder": str(folder)
        }  # fmt: skip
        path = os.pathsep.join(filter(None, [str(BENCHMARKS), os.environ.get("PYTHONPATH")]))
        with (folder / f"log-{rank}.txt").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "apart.child", json.dumps(order)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0,
                env={**os.environ, "PYTHONPATH": path, **env},
            )  # fmt: skip
        self.anon = 0
        self._heard = b""

    def look(self) -> None:
        now = footprint(self.process.pid)
        self.anon = max(self.anon, now.anon if now else 0)

    def hear(self) -> dict[str, Any] | None:
        """Return the next line, or None while it is incomplete. Raises Failed when the process has
        ended."""
        assert self.process.stdout is not None
        told = os.read(self.process.stdout.fileno(), 1 << 16)
        if not told:
            raise Failed(f"a process ended with {self.process.wait()}")
        self._heard += told
        if not self._heard.endswith(b"\n"):
            return None
        line, self._heard = self._heard, b""
        said: dict[str, Any] = json.loads(line)
        return said

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def _all(children: Sequence[_Child], limit: float, *, watch: bool = False) -> list[dict[str, Any]]:
    """Return the next line of each process; with `watch`, sample their memory until all lines are
    there."""
    heard: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + limit
    with selectors.DefaultSelector() as waiting:
        for number, child in enumerate(children):
            assert child.process.stdout is not None
            waiting.register(child.process.stdout, selectors.EVENT_READ, number)
        while len(heard) < len(children):
            if time.monotonic() > deadline:
                raise Failed(f"nothing heard for {limit:.0f} s")
            for child in children if watch else ():
                child.look()
            for key, _ in waiting.select(LOOK if watch else 1.0):
                told = children[key.data].hear()
                if told is not None:
                    heard[key.data] = told
                    waiting.unregister(key.fileobj)
    return [heard[number] for number in range(len(children))]


def _go(children: Sequence[_Child]) -> None:
    for child in children:
        assert child.process.stdin is not None
        child.process.stdin.write(b"go\n")


def _part(anon: int, idle: dict[str, Any], measured: dict[str, Any], found: dict[str, Any]) -> Part:
    before = Footprint(*idle["idle"])
    return Part(
        seconds=measured["seconds"],
        cpu=measured["cpu"],
        read=measured["read"],
        idle=before,
        peak=Footprint(measured["peak_rss"], max(anon, before.anon)),
        found=found,
    )


def _logs(folder: Path) -> str:
    files = sorted(folder.glob("log-*.txt"))
    return "\n".join(
        f"{file.name}:\n{file.read_text('utf-8', 'replace')[-TAIL:]}" for file in files
    )

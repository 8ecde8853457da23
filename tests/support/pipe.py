"""`pipe` run in real processes, with more stages installed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent.parent


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str
    seconds: float


class Pipe:
    """`pipe` in processes of its own, with the misbehaving stages installed."""

    def __init__(self, plugin: Path, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "the run"
        path = os.pathsep.join([str(plugin), str(REPOSITORY)])
        self.environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            self.environment.pop(name, None)

    def recipe(self, *, procs: int = 1, **slots: Mapping[str, Any]) -> Path:
        """Write a recipe; slots `export=dict(fault="raise")` add to the usual chain's fields."""
        chain: dict[str, dict[str, Any]] = {
            slot: {"use": f"fault.{slot}"} for slot in ("declare", "train", "export", "report")
        }
        for slot, fields in slots.items():
            chain[slot] |= fields
        path = self.folder / "recipe.yaml"
        launch = {"procs": procs, "device": "cpu"}
        path.write_text(json.dumps({"name": "faulty", "launch": launch, "stages": chain}))
        return path

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """A command of this Python, running."""
        return subprocess.Popen(
            [sys.executable, *command], text=True, cwd=self.folder,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self.environment | environment,
        )  # fmt: skip

    def end(self, process: subprocess.Popen[str], limit: float = 90) -> Outcome:
        """Wait for a command."""
        began = time.monotonic()
        stdout, stderr = process.communicate(timeout=limit)
        seconds = time.monotonic() - began
        return Outcome(code=process.returncode, stdout=stdout, stderr=stderr, seconds=seconds)

    def __call__(self, *arguments: str, **environment: str) -> Outcome:
        """`pipe ARGUMENTS` to its end."""
        return self.end(self.start("-m", "pipeline", *arguments, **environment))

    def run(self, recipe: Path, **environment: str) -> Outcome:
        """`pipe run` in the run folder of this test."""
        return self("run", str(recipe), "--run-dir", str(self.run_dir), **environment)

    def calls(self) -> list[str]:
        """What stages ran, and what was closed."""
        return (self.run_dir / "calls.txt").read_text().splitlines()

    def events(self) -> list[dict[str, Any]]:
        """The journal."""
        lines = (self.run_dir / "journal.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def processes(self) -> list[str]:
        """Command lines of live processes that name the run folder."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if str(self.run_dir) in line:
                    found.append(line)
        return found

    def wait_for(self, condition: Callable[[], object], limit: float = 60) -> None:
        """Until something is so."""
        deadline = time.monotonic() + limit
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.05)

"""One run of `benchmarks/watching.py`, and what its processes used."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import statistics
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil
import yaml
from overhead_job import MODEL

from pipeline.contracts.metrics import records

WARM = 5
"""Steps at the start of a run that are not counted."""
FEEDER = "pipeline.track.feeder"
LOOK_SECONDS = 0.5
KEPT = 3000
"""Bytes of a drawn run's output that are shown if it fails."""
LENGTH, VOCABULARY = 128, 49152
WORDS = "words.txt"
TEXT = "It is a truth universally acknowledged, that one step takes as long as the next.\n" * 20_000


@dataclass(frozen=True, kw_only=True)
class Run:
    """Times of one run in seconds; `cpu` stands for the processor's."""

    steps: list[float]
    """Time of each counted step."""
    launcher_cpu: float
    """Time a counted step of the process that draws."""
    trackers_cpu: float
    """Time a counted step of all trackers' processes together."""

    @property
    def mean(self) -> float:
        """Mean seconds of a step."""
        return statistics.fmean(self.steps)


def measure(folder: Path, *, watched: bool, steps: int, batch: int) -> Run:
    """Train once; return what it took."""
    folder.mkdir()
    file = folder / "recipe.yaml"
    made = recipe(folder.parent, trackers(folder) if watched else {}, steps, batch)
    file.write_text(yaml.safe_dump(made, sort_keys=False), "utf-8")
    run = folder / "run"
    command = [sys.executable, "-P", "-m", "pipetrain", "run", str(file), "--run-dir", str(run)]
    cpu = Cpu(run / "metrics.jsonl")
    (drawn if watched else quiet)(command, cpu)
    taken = [record for record in records(run / "metrics.jsonl") if "step_seconds" in record]
    return Run(
        steps=[float(record["step_seconds"]) for record in taken[WARM:]],
        launcher_cpu=cpu.launcher / (steps - WARM),
        trackers_cpu=cpu.trackers / (steps - WARM),
    )


def trackers(folder: Path) -> dict[str, Any]:
    """Return two slots with trackers."""
    return {
        "sqlite": {"use": "track.sqlite", "file": str(folder / "runs.sqlite")},
        "tensorboard": {"use": "track.tensorboard"},
    }


def recipe(folder: Path, tracked: Mapping[str, Any], steps: int, batch: int) -> dict[str, Any]:
    """Return the recipe of a run that reports every step."""
    stages: dict[str, Any] = {
        **tracked,
        "model": {
            "use": "model.hf",
            "config": {**MODEL, "vocab_size": VOCABULARY, "tie_word_embeddings": True},
            "tokenizer": str(tokenizer()),
        },
        "precision": {"use": "precision.policy", "compute": "fp32"},
        "data": {
            "use": "data.text",
            "files": str(folder / WORDS),
            "sequence_length": LENGTH,
            "cache": str(folder / "cache"),
        },
        "optimizer": {"use": "optimizer.adamw", "lr": 3e-4},
        "wrap": {"use": "wrap.ddp"},
        "checkpoint": {"use": "checkpoint.sharded"},
        "train": {
            "use": "train.causal_lm", "steps": steps, "global_batch_size": batch,
            "micro_batch_size": batch, "log_every": 1,
        },
    }  # fmt: skip
    launch = {"procs": 1, "device": "cpu", "threads": 1}
    return {"name": "watched", "launch": launch, "stages": stages}


def tokenizer() -> Path:
    """Return the file that the quickstart's tokenizer is in."""
    folder = Path(__file__).parents[1] / "recipes" / "models" / "smollm2-135m-instruct"
    found = next(folder.glob("*.gguf"), None)
    if found is None:
        raise click.ClickException("run recipes/fetch_smollm.py first: its tokenizer is used")
    return found


def quiet(command: Sequence[str], cpu: Cpu) -> None:
    """Run a command that prints nothing."""
    process = subprocess.Popen([*command, "--quiet"], stdin=subprocess.DEVNULL)
    while process.poll() is None:
        cpu.look(process.pid)
        time.sleep(LOOK_SECONDS)
    require_success(process.returncode)


def drawn(command: Sequence[str], cpu: Cpu) -> None:
    """Run a command in a terminal of its own."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execvp(command[0], command)
    termios.tcsetwinsize(terminal, (40, 120))
    said = b""
    while True:
        ready, _, _ = select.select([terminal], [], [], LOOK_SECONDS)
        if ready:
            try:
                said = (said + os.read(terminal, 1 << 16))[-KEPT:]
            except OSError:  # the terminal's other end is closed
                break
        cpu.look(pid)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    require_success(os.waitstatus_to_exitcode(status), said.decode(errors="replace"))


def require_success(code: int, said: str = "") -> None:
    """Raise click.ClickException, with the last that it has said, for a failed run's exit code."""
    if code:
        raise click.ClickException(f"a run has failed with {code}\n{said}")


class Cpu:
    """Processor seconds of a run's processes that do not train, since the first counted step."""

    def __init__(self, metrics: Path) -> None:
        self._metrics, self._looked = metrics, 0.0
        self._launcher = 0
        self._seconds: dict[int, float] = {}
        self._before: dict[int, float] = {}

    def look(self, launcher: int) -> None:
        """Read what the processes have used by now, if the last look was a while ago."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked, self._launcher = time.monotonic(), launcher
        with contextlib.suppress(psutil.Error):
            own = psutil.Process(launcher)
            for process in (own, *own.children(recursive=True)):
                if process == own or FEEDER in process.cmdline():
                    used = process.cpu_times()
                    self._seconds[process.pid] = used.user + used.system
        if sum("step_seconds" in record for record in records(self._metrics)) < WARM:
            self._before = dict(self._seconds)

    @property
    def launcher(self) -> float:
        """Seconds of the process that checks the recipe, starts the ranks and draws."""
        return self._since(self._launcher)

    @property
    def trackers(self) -> float:
        """Seconds of all trackers' processes."""
        return sum(self._since(pid) for pid in self._seconds if pid != self._launcher)

    def _since(self, pid: int) -> float:
        return self._seconds.get(pid, 0.0) - self._before.get(pid, 0.0)

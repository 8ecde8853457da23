"""The script of `pipe launch` under a real Slurm: stopped, preempted, requeued, finished."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.pipe import Pipe
from tests.support.slurm import slurm, why_not
from tests.support.tiny_recipe import EXPORT, losses, outcome, training

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
STEPS = 40


def write_job(pipe: Pipe, tmp_path: Path, recipe: Path, tasks: str) -> tuple[Path, dict[str, str]]:
    """Return the script of `pipe launch`, and the environment in which it is submitted."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    program = bin_ / "pipe"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m pipetrain "$@"\n')
    program.chmod(0o755)
    options = ["--target", "slurm", "--print", "--tasks", tasks, "--run-dir", str(pipe.run_dir)]
    command = [str(program), "launch", str(recipe), *options]
    script = tmp_path / "job.sh"
    made = subprocess.run(command, env=pipe.environment, capture_output=True, check=True)
    script.write_bytes(made.stdout)
    path = f"{bin_}:{os.environ['PATH']}"
    return script, pipe.environment | {"READ_SECONDS": "0.05", "PATH": path}


def write_recipe(tmp_path: Path) -> Path:
    """Write a recipe that saves every five steps."""
    stages = training(checkpoint={"every": 5, "keep": 2}, train={"steps": STEPS}) | EXPORT
    recipe = tmp_path / "recipe.yaml"
    head = {"name": "tiny", "launch": {"procs": 2, "device": "cpu", "restarts": {"limit": 0}}}
    recipe.write_text(json.dumps(head | {"stages": stages}))
    return recipe


@pytest.fixture
def calm(plugin: Path, tmp_path: Path) -> Pipe:
    """Return an undisturbed run of the same recipe."""
    calm = Pipe(plugin, tmp_path / "calm", starts=True)
    calm.folder.mkdir()
    assert calm.run(write_recipe(tmp_path)).code == 0
    return calm


def test_a_job_goes_on_after_a_lost_node_and_a_killed_rank(
    pipe: Pipe, tmp_path: Path, calm: Pipe
) -> None:
    """`pipe` itself starts nothing again here: Slurm does."""
    script, given = write_job(pipe, tmp_path, write_recipe(tmp_path), "node")
    folder = tmp_path / "slurm"
    folder.mkdir()
    with slurm(folder) as found:
        job = found.call("sbatch", "--parsable", str(script), **given).strip()
        pipe.wait_for(lambda: len(losses(pipe.run_dir)) >= 7)
        node = f"NodeName={socket.gethostname()}"
        found.call("scontrol", "update", node, "State=DOWN", "Reason=lost")
        found.wait_for(job, "PENDING")
        pipe.wait_for(lambda: not pipe.processes())
        there = len(losses(pipe.run_dir))
        with contextlib.suppress(subprocess.CalledProcessError):  # it may be back already
            found.call("scontrol", "update", node, "State=RESUME")
        found.start_again(job)
        pipe.wait_for(lambda: len(losses(pipe.run_dir)) >= there + 2)
        (rank, *_) = (
            process.pid
            for process in psutil.process_iter()
            if {"pipeline.execution.worker", str(pipe.run_dir)} <= {*process.cmdline()}
        )
        os.kill(rank, signal.SIGKILL)
        found.wait_for(job, "PENDING")
        found.start_again(job)
        found.wait_for(job, "COMPLETED", limit=90)
        said = (folder / f"tiny-{job}.out").read_text()
    assert "was killed by SIGKILL" in said
    assert outcome(pipe.run_dir, STEPS) == outcome(calm.run_dir, STEPS)


@pytest.mark.parametrize("tasks", ["node", "gpu"])
def test_a_job_that_is_stopped_and_preempted_finishes(
    pipe: Pipe, tmp_path: Path, calm: Pipe, tasks: str
) -> None:
    script, given = write_job(pipe, tmp_path, write_recipe(tmp_path), tasks)
    folder = tmp_path / "slurm"
    folder.mkdir()
    with slurm(folder) as found:
        job = found.call("sbatch", "--parsable", str(script), **given).strip()
        metrics = pipe.run_dir
        pipe.wait_for(lambda: len(losses(metrics)) >= 3)
        found.call("scancel", "--signal=USR1", job)  # as --signal does before the time limit
        found.wait_for(job, "PENDING")
        said = folder / f"tiny-{job}.out"
        assert "stopped by SIGUSR1" in said.read_text()
        stopped = len(losses(metrics))
        found.start_again(job)
        pipe.wait_for(lambda: len(losses(metrics)) >= stopped + 3)
        found.call("scontrol", "requeue", job)  # as preemption does
        found.wait_for(job, "PENDING")
        assert "stopped by SIGTERM" in said.read_text()
        found.start_again(job)
        found.wait_for(job, "COMPLETED", limit=90)
        assert "Traceback" not in said.read_text()
    assert outcome(pipe.run_dir, STEPS) == outcome(calm.run_dir, STEPS)

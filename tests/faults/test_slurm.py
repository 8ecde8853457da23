"""The script of `pipe launch` under a real Slurm: stopped, preempted, requeued, finished."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pipe import Pipe
from tests.support.slurm import slurm, why_not
from tests.support.tiny_recipe import EXPORT, losses, outcome, training

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
STEPS = 40


@pytest.mark.parametrize("tasks", ["node", "gpu"])
def test_a_job_that_is_stopped_and_preempted_finishes(
    pipe: Pipe, plugin: Path, tmp_path: Path, tasks: str
) -> None:
    stages = training(checkpoint={"every": 5, "keep": 2}, train={"steps": STEPS}) | EXPORT
    recipe = tmp_path / "recipe.yaml"
    head = {"name": "tiny", "launch": {"procs": 2, "device": "cpu"}}
    recipe.write_text(json.dumps(head | {"stages": stages}))
    calm = Pipe(plugin, tmp_path / "calm", starts=True)
    calm.folder.mkdir()
    assert calm.run(recipe).code == 0
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    program = bin_ / "pipe"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m pipetrain "$@"\n')
    program.chmod(0o755)
    path = f"{bin_}:{os.environ['PATH']}"
    options = ["--target", "slurm", "--print", "--tasks", tasks, "--run-dir", str(pipe.run_dir)]
    command = [str(program), "launch", str(recipe), *options]
    script = tmp_path / "job.sh"
    made = subprocess.run(command, env=pipe.environment, capture_output=True, check=True)
    script.write_bytes(made.stdout)
    folder = tmp_path / "slurm"
    folder.mkdir()
    with slurm(folder) as found:
        given = pipe.environment | {"READ_SECONDS": "0.05", "PATH": path}
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

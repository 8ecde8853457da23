"""A batch script for Slurm."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from pipeline.distributed.environment import TOKEN
from pipeline.errors import RunStopped, UsageError
from pipeline.launch.targets.job import (
    FLAG,
    MOUNT_WITH_OPTIONS,
    NEW_TOKEN,
    Form,
    Job,
    Target,
    comment,
)

STOPPED = RunStopped.exit_code
TIME: Form = (re.compile(r"(\d+-)?\d+(:\d+){0,2}"), "[DAYS-]HOURS:MINUTES:SECONDS")
"""Forms of sbatch's --time (https://slurm.schedmd.com/sbatch.html)."""


def write(job: Job) -> str:
    """The script for `sbatch`. Raises UsageError where a job would be stopped at its start."""
    limit = _seconds(job.time_limit) if job.time_limit else None
    if limit is not None and limit <= job.grace:
        raise UsageError(
            f"a job with --time-limit {job.time_limit} would be stopped at its start, --grace "
            f"{job.grace} seconds before its end",
            hint="raise --time-limit, or lower --grace",
        )
    return "".join(["#!/bin/bash\n", *_head(job), "\n", *_options(job), "\n", *_body(job)])


def _seconds(limit: str) -> int:
    """The seconds of a time limit: MINUTES[:SECONDS], HOURS:MINUTES:SECONDS or DAYS-HOURS[:...]."""
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not dash and len(parts) < 3:
        parts = [0, *parts]
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return 60 * (60 * (24 * int(days or 0) + hours) + minutes) + seconds


def _head(job: Job) -> Iterator[str]:
    yield comment(f"{job.name}: written by `pipe launch`; submit it with sbatch.")
    yield comment(
        "The recipe, the run's folder and the program must lie where all nodes see them. The same "
        "script continues the run in its folder."
    )


def _options(job: Job) -> Iterator[str]:
    few, most = job.fewest_nodes, job.most_nodes
    ranks = job.procs or job.gpus or 1
    yield _option("job-name", job.name)
    yield _option("nodes", str(most) if few == most else f"{few}-{most}")
    yield _option("ntasks-per-node", str(ranks if job.tasks == "gpu" else 1))
    yield comment(
        "One core per rank; Slurm's default is one per task. --extra=--cpus-per-task=N asks for "
        "more."
    )
    yield _option("cpus-per-task", str(1 if job.tasks == "gpu" else ranks))
    if not any(line.startswith("--mem") for line in job.extra):
        yield comment("All memory of each node; --extra=--mem=200G asks for a part of it.")
        yield _option("mem", "0")
    if job.gpus:
        yield _option("gpus-per-node", f"{job.kind}:{job.gpus}" if job.kind else str(job.gpus))
    if job.time_limit:
        yield _option("time", job.time_limit)
    yield "\n" + comment(
        f"{job.grace} s before the time limit all tasks get SIGUSR1: the run saves and ends with "
        f"exit code {STOPPED}."
    )
    yield _option("signal", f"USR1@{job.grace}")
    yield comment("If it is preempted or a node fails, it goes back into the queue.")
    yield _option("requeue")
    yield _option("open-mode", "append")
    yield _option("output", f"{job.name}-%j.out")
    for line in job.extra:
        yield f"#SBATCH {line}\n"


def _option(name: str, value: str | None = None) -> str:
    return f"#SBATCH --{name}\n" if value is None else f"#SBATCH --{name}={value}\n"


def _body(job: Job) -> Iterator[str]:
    if job.tasks == "gpu":
        yield comment(
            "One task a GPU: each is a rank, which learns its place from Slurm. When one has ended "
            "the others get a minute to do so too."
        )
        wait = 60
    else:
        yield comment(
            "One task a node: it starts the node's ranks, and starts them again when one dies. "
            "Where the nodes meet follows from the job's nodes and its number."
        )
        wait = 0
    if job.needs_token:
        yield comment("Only nodes that know this secret can join; every start makes a new one.")
        yield f"{TOKEN}={NEW_TOKEN}\nexport {TOKEN}\n"
    if job.setup:
        yield comment("What `pipe` needs on a node (--setup).") + f"{job.setup}\n"
    if job.activation and not job.image and "activate" not in job.setup:
        yield comment(
            "The environment in which `pipe launch` was called; a --setup that has the word "
            "`activate` sets another."
        )
        yield "".join(f"{line}\n" for line in job.activation)
    yield comment("Since Slurm 22.05 srun does not take the number of cores from the job.")
    yield 'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"\n'
    options = ["srun", "--kill-on-bad-exit=0", f"--wait={wait}"]
    if job.image:
        options.append(f"--container-image={job.image}")
        mounts = [*job.mounts, *(f"{path}:{path}" for path in job.paths)]
        if job.run_dir:
            yield comment("The run's folder and what the recipe names are mounted where they are.")
            yield f"mkdir -p {shlex.quote(job.run_dir)}\n"
            mounts.append(f"{job.run_dir}:{job.run_dir}")
        options.append(f"--container-mounts={','.join(mounts)}")
    yield f"{shlex.join(options)} \\\n  {job.command}\ncode=$?\n\n"
    yield comment(f"{STOPPED}: it was asked to stop, and all that was done is saved.")
    yield (
        f'if [ "$code" -eq {STOPPED} ]; then\n'
        '  scontrol requeue "$SLURM_JOB_ID"\n'
        "  sleep 60 # until Slurm has taken the job back, which ends this script\n"
        "fi\n"
        'exit "$code"\n'
    )


TARGET = Target(
    write=write,
    submit=("sbatch",),
    client="sbatch",
    mount=MOUNT_WITH_OPTIONS,
    forms={"time_limit": TIME, "extra": FLAG},
    brings=True,
    uses=frozenset({"image", "setup", "mounts", "time_limit", "grace", "tasks", "extra", "kind"}),
)

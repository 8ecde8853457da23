"""A script that runs a container on one machine."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from pipeline.launch.targets.job import FLAG, MOUNT_WITH_OPTIONS, Job, Target, comment


def write(job: Job) -> str:
    """The script for bash."""
    return "".join(["#!/bin/bash\n", *_lines(job)])


def _lines(job: Job) -> Iterator[str]:
    yield comment(
        f"{job.name}: written by `pipe launch`; run it with bash. The same script continues the "
        "run in its folder, which must lie in a mounted folder. What the recipe names on "
        "this machine, and the recipe itself, are mounted where they are.",
        "`docker stop` asks the run to save and stop; it gets as long as --stop-timeout says.",
    )
    yield "set -u\n\n"
    options = ["docker", "run", "--rm", "--init", "--stop-timeout", str(job.grace)]
    options += ["--name", job.name]
    if job.gpus:
        options += ["--gpus", str(job.gpus)]
    yield comment("Processes of a run exchange data in shared memory; Docker's default is 64 MB.")
    options += ["--ipc", "host"]
    for mount in job.mounts:
        options += ["--volume", mount]
    for path in job.paths:
        options += ["--volume", f"{path}:{path}"]
    options += ["--workdir", job.folder]
    for name in job.env:
        options += ["--env", name]
    options += [*job.extra, job.image, "pipe", *job.arguments]
    yield f"exec {shlex.join(options)}\n"


TARGET = Target(
    write=write,
    submit=("bash", "{file}"),
    client="docker",
    carries_out=True,
    mount=MOUNT_WITH_OPTIONS,
    forms={"extra": FLAG},
    brings=True,
    forgets=True,
    uses=frozenset({"image", "mounts", "grace", "extra"}),
    needs=frozenset({"image"}),
)

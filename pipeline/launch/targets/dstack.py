"""A task for dstack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.launch.targets.job import Job, Target, block, comment, label, token_made_here


def write(job: Job) -> str:
    """The file for `dstack apply`."""
    return "".join(_parts(job))


def _parts(job: Job) -> Iterator[str]:
    yield comment(
        f"{job.name}: written by `pipe launch`; submit it with dstack apply -f.",
        "The run's folder must lie on a volume, and so must data and model, or be in the image; "
        "the same task continues the run in its folder.",
    )
    yield block("type", "task")
    yield block("name", label(job.name, 41))
    yield block("nodes", job.most_nodes)
    if job.image:
        yield block("image", job.image)
    else:
        yield block("python", "3.12")
    if job.files:
        pairs = [f"{path}:{path}" for path in job.files]
        yield block("files", pairs, "The recipe goes with the task.")
    if job.needs_token:
        yield token_made_here()
    if job.variables:
        yield block("env", job.variables, "Their values come from your environment.")
    setup = [job.setup] if job.setup else []
    yield block(
        "commands", [*setup, job.command],
        "Each node runs this; it learns its place from DSTACK_* variables.",
    )  # fmt: skip
    resources: dict[str, Any] = {}
    if job.gpus:
        resources["gpu"] = f"{job.kind}:{job.gpus}" if job.kind else job.gpus
    resources["shm_size"] = "16GB"
    yield block("resources", resources)
    if job.mounts:
        yield block("volumes", list(job.mounts))
    yield block(
        "retry", {"on_events": ["no-capacity", "interruption", "error"], "duration": "1d"},
        "A run that was stopped, or has failed, is started again and continues. dstack does not "
        "tell exit codes apart: one that must fail is started again for just as long.",
    )  # fmt: skip


TARGET = Target(
    write=write,
    submit=("dstack", "apply", "--yes", "--file", "{file}"),
    client="dstack",
    fresh=True,
    takes_recipe=True,
    forgets=True,
    uses=frozenset({"image", "setup", "mounts", "kind"}),
)

"""A task for SkyPilot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.launch.targets.job import Job, Target, block, comment, token_made_here


def write(job: Job) -> str:
    """The file for `sky jobs launch`."""
    return "".join(_parts(job))


def _parts(job: Job) -> Iterator[str]:
    yield comment(
        f"{job.name}: written by `pipe launch`; submit it with sky jobs launch, which starts it "
        "again elsewhere when its machines are taken away.",
        "The run's folder must lie in a mounted bucket or volume, or the recipe's checkpoint slot "
        "name a bucket (folder: s3://...): the same command then continues the run.",
    )
    yield block("name", job.name)
    resources: dict[str, Any] = {}
    if job.gpus:
        resources["accelerators"] = f"{job.kind}:{job.gpus}"
    if job.image:
        resources["image_id"] = f"docker:{job.image}"
    resources["job_recovery"] = {"max_restarts_on_errors": 3, "recover_on_exit_codes": [75]}
    yield block("resources", resources, "75: it was asked to stop, and all that was done is saved.")
    yield block("num_nodes", job.most_nodes)
    yield block(
        "workdir", ".",
        "The folder from which the job is submitted goes with it: a relative path of the recipe is "
        "one in there.",
    )  # fmt: skip
    pairs = [mount.rpartition(":") for mount in job.mounts]
    mounts = {target: _mounted(source) for source, _, target in pairs}
    mounts |= {path: path for path in job.paths}
    if mounts:
        yield block(
            "file_mounts", mounts,
            "A bucket that is only named is copied once, and nothing goes back; so it is mounted. "
            "What the recipe names elsewhere on this machine is copied to the same place.",
        )  # fmt: skip
    if job.needs_token:
        yield token_made_here()
    if job.variables:
        flags = " ".join(f"--secret {name}" for name in job.variables)
        yield block(
            "secrets", dict.fromkeys(job.variables, None),
            f"Their values come from your environment: sky jobs launch {flags} FILE",
        )  # fmt: skip
    if job.setup:
        yield block("setup", f"{job.setup}\n")
    yield comment("Each node runs this; it learns its place from SKYPILOT_* variables.")
    yield block("run", f"{job.command}\n")


def _mounted(source: str) -> str | dict[str, str]:
    return {"source": source, "mode": "MOUNT"} if "://" in source else source


TARGET = Target(
    write=write,
    submit=("sky", "jobs", "launch", "--yes", "{env}", "{file}"),
    client="sky",
    env_option="--secret",
    fresh=True,
    takes_folder=True,
    brings=True,
    uses=frozenset({"image", "setup", "mounts", "kind"}),
    needs_with_gpus=frozenset({"kind"}),
)

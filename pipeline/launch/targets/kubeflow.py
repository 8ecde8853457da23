"""A TrainJob for Kubeflow's Trainer v2."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pipeline.distributed.environment import TOKEN
from pipeline.launch.targets.job import (
    Form,
    Job,
    Target,
    block,
    command_line,
    comment,
    label,
    token_made_here,
)

SHARED = "shared-memory"
CLAIM: Form = (
    re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?:(?P<target>/[^:]*)"),
    "CLAIM:TARGET with an absolute TARGET",
)
"""A claim's name is a DNS subdomain
(https://kubernetes.io/docs/concepts/overview/working-with-objects/names/)."""


def write(job: Job) -> str:
    """The file for `kubectl create`."""
    return "".join(_parts(job))


def _parts(job: Job) -> Iterator[str]:
    yield comment(
        f"{job.name}: written by `pipe launch`; submit it with kubectl create -f.",
        "Recipe, data, model and run folder must lie on a volume that all nodes mount. Processes "
        "of a pod exchange data in /dev/shm, which is its memory. A node's process learns "
        "its place from PET_* variables, which the trainer's torch runtimes set.",
        "A pod that is asked to leave gets SIGTERM: the run saves and ends with exit code 75. "
        "Whether it is started again is said by the runtime (its JobSet's failurePolicy, its jobs' "
        "podFailurePolicy); the same TrainJob continues the run in its folder.",
    )
    yield block("apiVersion", "trainer.kubeflow.org/v1alpha1")
    yield block("kind", "TrainJob")
    yield block("metadata", {"name": _name(job)})
    spec = {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": _trainer(job),
        "runtimePatches": [_patch(job)],
    }
    if job.env:
        yield comment(
            f"Variables that the recipe reads come from the secret {_secret(job)}: kubectl create "
            f"secret generic {_secret(job)} --from-literal=NAME=VALUE"
        )
    if job.needs_token:
        yield token_made_here() + command_line(_prepare(job))
    yield block("spec", spec)


def _prepare(job: Job) -> str:
    """Make the secret of the nodes from the environment; one of an earlier start is as good."""
    if not job.needs_token:
        return ""
    return (
        f"kubectl get secret {_token(job)} >/dev/null 2>&1 || printenv {TOKEN} | "
        f"kubectl create secret generic {_token(job)} --from-file={TOKEN}=/dev/stdin"
    )


def _trainer(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = {
        "image": job.image,
        "command": ["pipe", *job.arguments],
        "numNodes": job.most_nodes,
    }
    ranks = job.procs or job.gpus
    if ranks:
        found["numProcPerNode"] = ranks
    if job.gpus:
        gpus = {"nvidia.com/gpu": str(job.gpus)}
        found["resourcesPerNode"] = {"limits": gpus, "requests": gpus}
    secrets = {name: _secret(job) for name in job.env}
    if job.needs_token:
        secrets[TOKEN] = _token(job)
    if secrets:
        found["env"] = [
            {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}}
            for name, secret in secrets.items()
        ]
    return found


def _patch(job: Job) -> dict[str, Any]:
    """Changes of the runtime's pods: volumes, shared memory, of which a container has 64 MB, and
    time to save before they are killed."""
    pod: dict[str, Any] = {"terminationGracePeriodSeconds": job.grace}
    pairs = [(f"volume-{n}", *mount.rpartition(":")) for n, mount in enumerate(job.mounts)]
    claims = [
        {"name": name, "persistentVolumeClaim": {"claimName": claim}} for name, claim, *_ in pairs
    ]
    mounts = [{"name": name, "mountPath": target} for name, *_, target in pairs]
    pod["volumes"] = [*claims, {"name": SHARED, "emptyDir": {"medium": "Memory"}}]
    shared = {"name": SHARED, "mountPath": "/dev/shm"}
    pod["containers"] = [{"name": "node", "volumeMounts": [*mounts, shared]}]
    node = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    jobs = {"template": {"spec": {"replicatedJobs": [node]}}}
    return {"manager": "pipetrain/pipe-launch", "trainingRuntimeSpec": jobs}


def _name(job: Job) -> str:
    """The job's name, with room for what its pods' names add."""
    return label(job.name, 50)


def _secret(job: Job) -> str:
    return f"{_name(job)}-env"


def _token(job: Job) -> str:
    return f"{_name(job)}-rendezvous"


TARGET = Target(
    write=write,
    submit=("kubectl", "create", "-f", "{file}"),
    client="kubectl",
    prepare=_prepare,
    uses=frozenset({"image", "mounts", "grace"}),
    needs=frozenset({"image"}),
    mount=CLAIM,
)

"""Schedulers and machines for which `pipe launch` writes a script, by name."""

from collections.abc import Mapping

from pipeline.launch.targets import docker, dstack, kubeflow, skypilot, slurm
from pipeline.launch.targets.job import Target

TARGETS: Mapping[str, Target] = {
    "slurm": slurm.TARGET,
    "kubeflow": kubeflow.TARGET,
    "skypilot": skypilot.TARGET,
    "dstack": dstack.TARGET,
    "docker": docker.TARGET,
}

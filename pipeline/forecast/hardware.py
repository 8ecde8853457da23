"""From what a person says of machines to numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.accelerators import ACCELERATORS, GB, GIB, NETWORKS, find_accelerator
from pipeline.errors import UsageError
from pipeline.forecast.site import Hardware, Site
from pipeline.suggest import did_you_mean

PER_NODE = 8
"""GPUs of a node, where nothing else is said."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the options of a command say. None: nothing."""

    gpus: int | None = None
    """Of one node."""
    nodes: int | None = None
    gpu: str | None = None
    memory: float | None = None
    """GiB of one GPU."""
    host_memory: float | None = None
    """GiB of one node."""
    interconnect: str | None = None
    """Between nodes: a name, or GB/s of a node in one direction."""
    disk: float | None = None
    """GB/s of the disk that state is offloaded to."""

    @property
    def overrides(self) -> Sequence[str]:
        """What it means for the recipe."""
        named = self.gpu is not None or self.memory is not None
        device = ["launch.device=cuda"] if named or self.gpus is not None else []
        if self.gpus is None and self.nodes is None:
            return device
        return [f"launch.procs={(self.gpus or PER_NODE) * (self.nodes or 1)}", *device]


def site_of(asked: Asked, ranks: int, device: str) -> Site:
    """Where so many ranks run."""
    local = asked.gpus or (PER_NODE if device != "cpu" else ranks)
    if asked.nodes is not None and asked.gpus is None:
        local = -(-ranks // asked.nodes)
    return Site(ranks=ranks, local_ranks=min(local, ranks), device=device)


def hardware_of(asked: Asked, site: Site, *, compute: str) -> Hardware:
    """What is known of the machines; on CPUs, of this one. Raises UsageError for names that nobody
    knows."""
    host = None if asked.host_memory is None else round(asked.host_memory * GIB)
    if site.device == "cpu":
        return Hardware(host_memory=host if host is not None else _here())
    gpu = None
    if asked.gpu is not None:
        gpu = find_accelerator(asked.gpu)
        if gpu is None:
            names = [known.name for known in ACCELERATORS]
            hint = did_you_mean(asked.gpu, names) or f"known: {', '.join(names)}"
            raise UsageError(f"--gpu {asked.gpu}: nobody knows it here", hint=hint)
    memory = gpu.memory if gpu else None
    if asked.memory is not None:
        memory = round(asked.memory * GIB)
    return Hardware(
        accelerator=gpu,
        device_memory=memory,
        host_memory=host,
        network=_network(asked.interconnect),
        peers=gpu.peers if gpu else None,
        host_link=gpu.host if gpu else None,
        disk_rate=None if asked.disk is None else asked.disk * GB,
        flops=(gpu.flops_fp32 if compute == "fp32" else gpu.flops) if gpu else None,
    )


def _here() -> int:
    from pipeline.machine import free_memory

    return free_memory()


def _network(said: str | None) -> float | None:
    if said is None:
        return None
    known = NETWORKS.get(said.lower())
    if known is not None:
        return known
    try:
        return float(said) * GB
    except ValueError as error:
        raise UsageError(
            f"--interconnect {said}: neither a name nor a number of GB/s",
            hint=f"names: {', '.join(NETWORKS)}",
        ) from error

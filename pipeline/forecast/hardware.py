"""From what a person says of machines to numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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

    machine: Path | None = None
    """What `pipe doctor --out` wrote."""

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
    """What is known of the machines; on CPUs, of this one. What a measured machine says goes before
    data sheets, what was asked for before both. Raises UsageError for names that nobody knows."""
    known = _of_kind(asked, compute) if site.device != "cpu" else Hardware(host_memory=_here())
    if asked.machine is not None:
        known = _of_machine(asked.machine, known, site, compute)
    said: dict[str, Any] = {
        "device_memory": None if asked.memory is None else round(asked.memory * GIB),
        "host_memory": None if asked.host_memory is None else round(asked.host_memory * GIB),
        "network": _network(asked.interconnect),
        "disk_rate": None if asked.disk is None else asked.disk * GB,
    }
    if site.device == "cpu":
        del said["device_memory"]
    return replace(known, **{name: value for name, value in said.items() if value is not None})


def _of_kind(asked: Asked, compute: str) -> Hardware:
    if asked.gpu is None:
        return Hardware()
    gpu = find_accelerator(asked.gpu)
    if gpu is None:
        names = [known.name for known in ACCELERATORS]
        hint = did_you_mean(asked.gpu, names) or f"known: {', '.join(names)}"
        raise UsageError(f"--gpu {asked.gpu}: nobody knows it here", hint=hint)
    return Hardware(
        accelerator=gpu,
        device_memory=gpu.memory,
        peers=gpu.peers,
        host_link=gpu.host,
        flops=gpu.flops_fp32 if compute == "fp32" else gpu.flops,
        bandwidth=gpu.bandwidth,
    )


def _of_machine(file: Path, known: Hardware, site: Site, compute: str) -> Hardware:
    """The rates of a machine of the same kind of device."""
    from pipeline.doctor.report import read_machine

    machine = read_machine(file)
    if machine.device != site.device:
        raise UsageError(
            f"{file} describes a machine that computes on {machine.device}, the recipe on "
            f"{site.device}",
            hint="take that of a machine like the one to be used",
        )
    rates: dict[str, Any] = {
        "flops": getattr(machine.matmul_flops, compute),
        "peers": machine.allreduce[-1].busbw if machine.allreduce else None,
        "host_link": machine.h2d_bytes_per_s,
        "disk_rate": machine.disk_read_bytes_per_s,
        "bandwidth": machine.host_copy_bytes_per_s if site.device == "cpu" else None,
        "host_memory": machine.host_memory_bytes,
        "device_memory": machine.devices[0].memory_bytes if machine.devices else None,
    }
    there = {name: rate for name, rate in rates.items() if rate is not None}
    return replace(known, measured=True, **there)


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

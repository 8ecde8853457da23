"""From what a person says of machines to numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipeline.accelerators import GB, GIB, Accelerator, accelerators, find_accelerator
from pipeline.errors import UsageError
from pipeline.machine import free_memory
from pipeline.planning.planner import Topology
from pipeline.suggest import did_you_mean

if TYPE_CHECKING:
    from pipeline.doctor.report import Machine

PER_NODE = 8
"""GPUs of a node, where nothing else is said."""

EMULATED = "how slow bf16 is on {0}: {0} has no bf16, computed at fp32's rate at best"


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Machines of one kind. None: not known, so nothing is said that depends on it."""

    kind: str | None = None
    """Name of a device; None on CPUs, and for a device of which only the memory is known."""
    device_memory: int | None = None
    """Bytes of one device; of a rank's share of host memory on CPUs."""
    host_memory: int | None = None
    """Bytes of one node."""
    network: float | None = None
    """Bytes a second that a node sends to others, in one direction, over all its links."""
    peers: float | None = None
    """Bytes a second that a device sends to others in its node."""
    host_link: float | None = None
    """Bytes a second between a device and its machine, in each direction."""
    disk_rate: float | None = None
    """Bytes a second of the disk that state is offloaded to."""
    flops: float | None = None
    """Operations a second of one device in the compute dtype."""
    bandwidth: float | None = None
    """Bytes a second between a device and its own memory."""
    matmul: float = 1.0
    """Share of `flops` that large products reach; 1 where `flops` was measured with them."""
    peak: float | None = None
    """Operations a second in the compute dtype that the device's data sheet promises."""
    price: float | None = None
    """Price of one device for an hour, in whatever currency."""
    measured: tuple[str, ...] = ()
    """Names of the fields above that are rates which programs reach, as `pipe doctor` measures
    them."""
    asked: tuple[str, ...] = ()
    """Names of the fields that a person has said; the others are what data sheets promise."""
    caveats: tuple[str, ...] = ()
    """Effects that the rates leave out of account."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Machines as the options of a command describe them. None: nothing was said."""

    gpus: int | None = None
    """GPUs of one node."""
    nodes: int | None = None
    gpu: str | None = None
    memory: float | None = None
    """GiB of one GPU."""
    host_memory: float | None = None
    """GiB of one node."""
    interconnect: float | None = None
    """GB/s that a node sends to others, in one direction, over all its links."""
    disk: float | None = None
    """GB/s of the disk that state is offloaded to."""
    price: float | None = None
    """Price of one GPU for an hour."""
    machine: Machine | None = None
    """One like those that are meant, as `pipe doctor` has found it."""

    @property
    def procs(self) -> int | None:
        """Over all nodes."""
        if self.gpus is None and self.nodes is None:
            return None
        return (self.gpus or PER_NODE) * (self.nodes or 1)

    @property
    def overrides(self) -> Sequence[str]:
        """Changes of the recipe that follow from it."""
        measured = self.machine is not None and self.machine.device != "cpu"
        return ["launch.device=cuda"] if measured or self.of_gpus else []

    @property
    def found(self) -> str | None:
        """Name of the measured machine's GPU."""
        return self.machine.devices[0].name if self.machine and self.machine.devices else None

    @property
    def kind(self) -> str | None:
        """Name of the GPU that is meant."""
        return self.gpu or self.found

    @property
    def of_gpus(self) -> Sequence[str]:
        """Options that were given and say something of GPUs."""
        said = {"--gpus": self.gpus, "--gpu": self.gpu, "--memory": self.memory}
        return [option for option, value in said.items() if value is not None]


def site_of(asked: Asked, ranks: int, device: str) -> Topology:
    """Where so many ranks run. Raises UsageError for what was said of GPUs where there are none."""
    if device == "cpu" and asked.of_gpus:
        raise UsageError(
            f"{asked.of_gpus[0]} is about GPUs, launch.device on the command line means CPUs",
            hint="leave out one of them",
        )
    if device == "cpu" and asked.nodes is not None:
        raise UsageError(
            "--nodes counts nodes with GPUs, and the recipe computes on CPUs",
            hint="--gpus says how many GPUs a node has; CPUs are planned for as one node",
        )
    local = asked.gpus or (PER_NODE if device != "cpu" else ranks)
    if asked.nodes is not None and asked.gpus is None:
        local = -(-ranks // asked.nodes)
    return Topology(ranks=ranks, local_ranks=min(local, ranks), device=device)


def hardware_of(asked: Asked, topology: Topology, *, compute: str) -> Hardware:
    """The machines, as far as they are known; on CPUs, this one. A measured machine goes before
    data sheets, a person's word before both. Raises UsageError for a GPU that nobody knows, and for
    a measured machine that is another than what was asked for."""
    on_cpu = topology.device == "cpu"
    known = Hardware(host_memory=free_memory()) if on_cpu else _of_kind(asked, compute)
    if asked.machine is not None:
        known = _of_machine(asked.machine, known, topology, compute)
    said: dict[str, Any] = {
        "device_memory": None if asked.memory is None else round(asked.memory * GIB),
        "host_memory": None if asked.host_memory is None else round(asked.host_memory * GIB),
        "network": None if asked.interconnect is None else asked.interconnect * GB,
        "disk_rate": None if asked.disk is None else asked.disk * GB,
        "price": asked.price,
    }
    if on_cpu:
        del said["device_memory"], said["price"]
    there = {name: value for name, value in said.items() if value is not None}
    measured = tuple(name for name in known.measured if name not in there)
    return replace(known, measured=measured, asked=tuple(there), **there)


def narrow_dtype(asked: Asked) -> str:
    """The dtype to compute in: bf16, or fp16 where there are no units for that."""
    gpu = _gpu(asked)
    return "bf16" if gpu is None or gpu.bf16 else "fp16"


def _of_kind(asked: Asked, compute: str) -> Hardware:
    gpu = _gpu(asked)
    if gpu is None:
        return Hardware()
    return Hardware(
        kind=gpu.name,
        device_memory=gpu.memory,
        peers=gpu.peers,
        host_link=gpu.host,
        flops=gpu.rate(compute),
        peak=gpu.rate(compute),
        matmul=gpu.matmul,
        bandwidth=gpu.bandwidth,
        caveats=(EMULATED.format(gpu.name),) if compute == "bf16" and not gpu.bf16 else (),
    )


def _gpu(asked: Asked) -> Accelerator | None:
    known = find_accelerator(asked.kind) if asked.kind else None
    if asked.gpu is not None and known is None:
        meant = did_you_mean(asked.gpu.upper(), [one.name for one in accelerators()])
        raise UsageError(
            f"--gpu {asked.gpu}: no GPU of this name is known", hint=f"{meant} or say --memory"
        )
    if asked.found and asked.gpu and find_accelerator(asked.found) is not known:
        raise UsageError(
            f"--machine describes one with {asked.found}, --gpu says {asked.gpu}",
            hint="leave out one of them",
        )
    return known


def _of_machine(machine: Machine, known: Hardware, topology: Topology, compute: str) -> Hardware:
    """The rates of a machine of the same kind of device."""
    if machine.device != topology.device:
        raise UsageError(
            f"--machine describes one that computes on {machine.device}, the recipe on "
            f"{topology.device}",
            hint="take that of a machine like the one to be used",
        )
    rates = {
        "flops": getattr(machine.matmul_flops, compute),
        "peers": machine.allreduce[-1].busbw if machine.allreduce else None,
        "host_link": machine.h2d_bytes_per_s,
        "disk_rate": machine.disk_read_bytes_per_s,
        "bandwidth": machine.host_copy_bytes_per_s if topology.device == "cpu" else None,
    }
    gpu = machine.devices[0] if machine.devices else None
    facts = {
        "kind": gpu and gpu.name,
        "host_memory": machine.host_memory_bytes,
        "device_memory": gpu and gpu.memory_bytes,
    }
    measured = {name: rate for name, rate in rates.items() if rate is not None}
    for name, rate in measured.items():
        if rate < 1:
            raise UsageError(f"--machine says {name} is {rate} a second, which none can be")
    there: dict[str, Any] = {name: fact for name, fact in facts.items() if fact is not None}
    if "flops" in measured:
        there |= {"caveats": (), "matmul": 1.0}
    return replace(known, measured=tuple(measured), **measured, **there)

"""The target hardware by options, measurements and data sheets, and the memory that GPUs lose."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import UsageError
from pipeline.hardware.gpus import GB, GIB, Accelerator, accelerators, find_accelerator
from pipeline.hardware.host import free_memory
from pipeline.planning.shapes import Topology
from pipeline.utils.text import closest

if TYPE_CHECKING:
    from pipeline.doctor.report import MachineReport
    from pipeline.execution.gpu_records import MemoryRecord

PER_NODE = 8
"""GPUs of a node without `--gpus`."""
COMPUTE, MEMORY, DISK = "compute", "memory", "NVMe"
INSIDE, BETWEEN = "network inside nodes", "network between nodes"
UP, DOWN = "PCIe to the GPU", "PCIe to the host"
"""Resources of a device, and of a node: its network to others and its disk. PCIe carries both
directions at once."""
SHEET, MEASURED, GIVEN = "data sheet", "measured rate", "rate as given"
EMULATED = "data sheet: fp32's rate at best, since this GPU has no bf16"
LOST_BESIDE = round(1.2 * GIB)
"""Bytes of a GPU in use beside torch's allocator: a CUDA context of 0.3 GiB and libraries' kernels
(github.com/pytorch/pytorch/issues/107667), 0.5 to 0.7 GiB for each communicator of NCCL
(github.com/NVIDIA/nccl/issues/964)."""
LOST_BETWEEN = 0.08
"""Share of tensors' bytes that torch's allocator reserves and cannot use. Answer.AI
(github.com/AnswerDotAI/fsdp_qlora, benchmarks_03_2024.md) saw 12 and 24 % with room to spare. More
than 10 % would contradict a QLoRA of 65B on 48 GB (Dettmers et al. 2023): tensors of 42 GiB."""
HEADROOM = 0.08
"""Share of a GPU's memory that advice leaves free, unless a run was measured: of 72 trainings that
others published, 25 took over 8 % more than their plans."""
RUNS = Path("runs")
"""Default folder of runs."""
FULL_ENOUGH = 0.25
"""Least share of a GPU's memory in tensors for its loss to be that of a full GPU."""


@dataclass(frozen=True)
class Rate:
    """Operations in the compute dtype, or bytes in one direction, per second."""

    value: float
    origin: str = SHEET

    @property
    def measured(self) -> bool:
        """Whether programs reach it."""
        return self.origin == MEASURED


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Machines of one kind. kind, device_memory, price: the device's name, bytes, and price per
    hour. host_memory: bytes of a node. rates: by resource. peak: operations per second by the data
    sheet, of which large matrix products reach the share `matmul`. None: not known."""

    kind: str | None = None
    device_memory: int | None = None
    host_memory: int | None = None
    rates: Mapping[str, Rate] = field(default_factory=dict)
    matmul: float = 1.0
    peak: float | None = None
    price: float | None = None


@dataclass(frozen=True, kw_only=True)
class HardwareOptions:
    """Machines as the options of a command describe them, in GiB and GB/s; None: not given. gpus,
    host_memory, interconnect: of a node; memory, price: of a GPU; machine: the report of `pipe
    doctor` on such a machine."""

    gpus: int | None = None
    nodes: int | None = None
    gpu: str | None = None
    memory: float | None = None
    host_memory: float | None = None
    interconnect: float | None = None
    disk: float | None = None
    price: float | None = None
    machine: MachineReport | None = None

    def __post_init__(self) -> None:
        """Raise UsageError for a GPU of an unknown kind."""
        _gpu(self)

    @property
    def procs(self) -> int | None:
        """Number of processes over all nodes."""
        return (self.gpus or PER_NODE) * (self.nodes or 1) if self.gpus or self.nodes else None

    @property
    def on_gpus(self) -> bool:
        """Whether the machines have GPUs."""
        return bool(self.of_gpus) or (self.machine is not None and self.machine.device != "cpu")

    @property
    def kind(self) -> str | None:
        """Name of the GPU."""
        found = self.machine.devices if self.machine else ()
        return self.gpu or (found[0].name if found else None)

    @property
    def of_gpus(self) -> Sequence[str]:
        """Given options that are about GPUs."""
        names = "gpus", "nodes", "gpu", "memory"
        return [f"--{name}" for name in names if getattr(self, name) is not None]


def resolve_topology(
    machines: HardwareOptions, ranks: int, device: str, per_node: int | None = None
) -> Topology:
    """Topology of `ranks` ranks, `per_node` on each node unless the options say otherwise. Raises
    UsageError for options about GPUs on CPUs."""
    if device == "cpu" and machines.of_gpus:
        raise UsageError(
            f"{machines.of_gpus[0]} is about GPUs, launch.device on the command line means CPUs",
            hint="leave out one of them",
        )
    local = ranks if device == "cpu" else machines.gpus or per_node or PER_NODE
    return Topology(ranks=ranks, local_ranks=min(local, ranks), device=device)


def resolve_hardware(machines: HardwareOptions, topology: Topology, *, compute: str) -> Hardware:
    """Hardware of the target. Precedence: options, then a measured machine, then data sheets; plans
    for CPUs use this machine. Raises UsageError for an unknown GPU, and for a measured machine that
    contradicts the options."""
    on_cpu = topology.device == "cpu"
    sizes = {"device_memory": machines.memory, "host_memory": machines.host_memory}
    given = {BETWEEN: machines.interconnect, DISK: machines.disk}
    here: tuple[dict[str, Any], dict[str, Rate]] = {"host_memory": free_memory()}, {}
    facts, rates = here if on_cpu else _of_gpu(machines, compute)
    more, measured = _of_machine(machines, topology, compute)
    more |= {name: round(size * GIB) for name, size in sizes.items() if size}
    rates |= {part: Rate(rate, MEASURED) for part, rate in measured.items() if rate}
    rates |= {part: Rate(rate * GB, GIVEN) for part, rate in given.items() if rate}
    return Hardware(**facts | more, rates=rates, price=None if on_cpu else machines.price)


def narrow_dtype(machines: HardwareOptions) -> str:
    """The narrow dtype to compute in: bf16, or fp16 on GPUs without bf16."""
    gpu = _gpu(machines)
    return "bf16" if gpu is None or gpu.bf16 else "fp16"


def _gpu(machines: HardwareOptions) -> Accelerator | None:
    known = find_accelerator(machines.kind) if machines.kind else None
    if machines.gpu is not None and known is None:
        meant = closest(machines.gpu.upper(), [one.name for one in accelerators()])
        which = f"did you mean `{meant}`?" if meant else f"known: {_known()}"
        instead = "say --memory" if machines.memory is None else "leave out --gpu"
        raise UsageError(
            f"--gpu {machines.gpu}: no GPU of this name is known", hint=f"{which} or {instead}"
        )
    return known


def _known() -> str:
    """The names of one word, in the order of letters and numbers, and the kinds of the rest."""
    names = [one.name for one in accelerators() if " " not in one.name]
    parts = re.compile(r"\d+|\D+")
    in_order = sorted(
        names, key=lambda name: [(p.isdigit(), p.zfill(6)) for p in parts.findall(name)]
    )
    return f"{', '.join(in_order)}, their variants as in `H100 PCIe`, RTX cards as in `RTX 4090`;"


def _of_gpu(machines: HardwareOptions, compute: str) -> tuple[dict[str, Any], dict[str, Rate]]:
    """Facts and rates of a GPU by its data sheet."""
    gpu = _gpu(machines)
    if gpu is None:
        return {}, {}
    rate, emulated = gpu.rate(compute), compute == "bf16" and not gpu.bf16
    links = {MEMORY: gpu.bandwidth, INSIDE: gpu.peers, UP: gpu.host, DOWN: gpu.host}
    rates = {COMPUTE: Rate(rate, EMULATED if emulated else SHEET)}
    facts = {"kind": gpu.name, "device_memory": gpu.memory, "matmul": gpu.matmul, "peak": rate}
    return facts, rates | {part: Rate(each) for part, each in links.items()}


def _of_machine(
    machines: HardwareOptions, topology: Topology, compute: str
) -> tuple[dict[str, Any], dict[str, float | None]]:
    """Facts and rates of the measured machine."""
    machine = machines.machine
    if machine is None:
        return {}, {}
    gpu = machine.devices[0] if machine.devices else None
    another = (
        gpu and machines.gpu and find_accelerator(gpu.name) is not find_accelerator(machines.gpu)
    )
    if another or machine.device != topology.device:
        meant = "CPUs" if topology.device == "cpu" else machines.gpu or "GPUs"
        raise UsageError(
            f"--machine describes one with {gpu.name if gpu else 'CPUs'}, not with {meant}",
            hint="give the report of a machine like the target",
        )
    facts: dict[str, Any] = {"kind": gpu.name, "device_memory": gpu.memory_bytes} if gpu else {}
    if machine.host_memory_bytes is not None:
        facts["host_memory"] = machine.host_memory_bytes
    return facts, {
        COMPUTE: getattr(machine.matmul_flops, compute),
        MEMORY: machine.host_copy_bytes_per_s if machine.device == "cpu" else None,
        INSIDE: machine.allreduce[-1].busbw if machine.allreduce else None,
        UP: machine.h2d_bytes_per_s,
        DOWN: machine.d2h_bytes_per_s,
        DISK: machine.disk_read_bytes_per_s,
    }


@dataclass(frozen=True, kw_only=True)
class Margins:
    """Memory that a GPU loses: bytes beside tensors, and a share of tensors' bytes between them."""

    overhead: int = LOST_BESIDE
    fragmentation: float = LOST_BETWEEN
    source: str = "assumed until measured"
    headroom: float = HEADROOM
    """Share of a GPU's memory that advice leaves free if it can."""

    def of(self, tensors: int) -> int:
        """Bytes of a device for `tensors` bytes of tensors."""
        return round(tensors * (1 + self.fragmentation)) + self.overhead


def margins_for(
    kind: str | None, *, record: Path | None, overhead: float | None, runs: Path = RUNS
) -> Margins:
    """Margins of GPUs of a kind: by the record of a named run, else of the newest run in the folder
    of runs, else assumed; `overhead` GiB replace the bytes beside tensors. Raises UsageError for a
    missing record, or one of another kind."""
    from pipeline.execution.gpu_records import newest_record, read_record

    named = None if record is None else (record.name, read_record(record))
    if named is not None and kind is not None and not _same(named[1].device, kind):
        raise UsageError(
            f"--measured {record} is of a run on {named[1].device}, the plan is for {kind}",
            hint="name a run on GPUs of the same kind",
        )
    found = named or (newest_record(runs, lambda one: _is_of(one, kind)) if kind else None)
    margins = Margins()
    if found is not None:
        run, measured = found
        margins = Margins(
            overhead=measured.beside_bytes,
            fragmentation=max(measured.reserved_bytes / measured.allocated_bytes - 1, 0.0),
            source=f"measured by run {run}",
            headroom=0.0,
        )
    return margins if overhead is None else replace(margins, overhead=round(overhead * GIB))


def _is_of(record: MemoryRecord, kind: str) -> bool:
    full = record.allocated_bytes >= FULL_ENOUGH * record.device_bytes
    return full and _same(record.device, kind)


def _same(one: str, other: str) -> bool:
    known = find_accelerator(one)
    return one == other or (known is not None and known is find_accelerator(other))

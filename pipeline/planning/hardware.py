"""The target hardware by options, measurements and data sheets, and the memory that GPUs lose."""

from __future__ import annotations

import re
from collections.abc import Mapping
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

PER_NODE = 8
"""GPUs of a node without `--gpus`."""
COMPUTE, MEMORY, DISK = "compute", "memory", "NVMe"
INSIDE, BETWEEN = "network inside nodes", "network between nodes"
UP, DOWN = "PCIe to the GPU", "PCIe to the host"
"""Resources of a device, and of a node: its network and its disk. PCIe carries both directions."""
SHEET, MEASURED, GIVEN = "data sheet", "measured rate", "rate as given"
EMULATED = "data sheet: fp32's rate at best, since this GPU has no bf16"
LOST_BESIDE = round(1.2 * GIB)
"""Bytes of a GPU in use outside torch's allocator: a CUDA context of 0.3 GiB and libraries' kernels
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
"""Least share of a GPU's memory in tensors for its loss to be a full GPU's."""


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
    sheet; large matrix products reach the share `matmul`. None: not known."""

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
    host_memory, interconnect: of a node; memory, price: of a GPU; machine: `pipe doctor`'s report.
    Raises UsageError for a GPU of an unknown kind."""

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
        if self.gpu is None or self.accelerator is not None:
            return
        names = [one.name for one in accelerators()]
        meant = closest(self.gpu.upper(), names)
        # The names of one word, in the order of letters and numbers, and the kinds of the rest.
        parts = re.compile(r"\d+|\D+")
        words = sorted(
            (name for name in names if " " not in name),
            key=lambda name: [(p.isdigit(), p.zfill(6)) for p in parts.findall(name)],
        )
        rest = "their variants as in `H100 PCIe`, RTX cards as in `RTX 4090`;"
        which = f"did you mean `{meant}`?" if meant else f"known: {', '.join(words)}, {rest}"
        instead = "say --memory" if self.memory is None else "leave out --gpu"
        said = f"--gpu {self.gpu}: no GPU of this name is known"
        raise UsageError(said, hint=f"{which} or {instead}")

    @property
    def procs(self) -> int | None:
        return (self.gpus or PER_NODE) * (self.nodes or 1) if self.gpus or self.nodes else None

    @property
    def of_gpus(self) -> list[str]:
        names = "gpus", "nodes", "gpu", "memory"
        return [f"--{name}" for name in names if getattr(self, name) is not None]

    @property
    def on_gpus(self) -> bool:
        return bool(self.of_gpus) or (self.machine is not None and self.machine.device != "cpu")

    @property
    def kind(self) -> str | None:
        found = self.machine.devices if self.machine else ()
        return self.gpu or (found[0].name if found else None)

    @property
    def accelerator(self) -> Accelerator | None:
        """The GPU by its data sheet, of a known kind."""
        return find_accelerator(self.kind) if self.kind else None


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
    for CPUs use this machine. Raises UsageError for a machine that contradicts the options."""
    on_cpu, gpu = topology.device == "cpu", machines.accelerator
    facts: dict[str, Any] = {"host_memory": free_memory()} if on_cpu else {}
    rates: dict[str, Rate] = {}
    if gpu is not None and not on_cpu:
        rate, emulated = gpu.rate(compute), compute == "bf16" and not gpu.bf16
        facts = {"kind": gpu.name, "device_memory": gpu.memory, "matmul": gpu.matmul, "peak": rate}
        links = {MEMORY: gpu.bandwidth, INSIDE: gpu.peers, UP: gpu.host, DOWN: gpu.host}
        rates = {part: Rate(each) for part, each in links.items()}
        rates[COMPUTE] = Rate(rate, EMULATED if emulated else SHEET)
    machine = machines.machine
    if machine is not None:
        own = machine.devices[0] if machine.devices else None
        asked = machines.gpu and own and find_accelerator(own.name) is not gpu
        if asked or machine.device != topology.device:
            meant = "CPUs" if on_cpu else machines.gpu or "GPUs"
            raise UsageError(
                f"--machine describes one with {own.name if own else 'CPUs'}, not with {meant}",
                hint="give the report of a machine like the target",
            )
        found = {
            "kind": own and own.name, "device_memory": own and own.memory_bytes,
            "host_memory": machine.host_memory_bytes,
        }  # fmt: skip
        facts |= {name: value for name, value in found.items() if value is not None}
        measured = {
            COMPUTE: getattr(machine.matmul_flops, compute),
            MEMORY: machine.host_copy_bytes_per_s if machine.device == "cpu" else None,
            INSIDE: machine.allreduce[-1].busbw if machine.allreduce else None,
            UP: machine.h2d_bytes_per_s,
            DOWN: machine.d2h_bytes_per_s,
            DISK: machine.disk_read_bytes_per_s,
        }
        rates |= {part: Rate(rate, MEASURED) for part, rate in measured.items() if rate}
    sizes = {"device_memory": machines.memory, "host_memory": machines.host_memory}
    facts |= {name: round(size * GIB) for name, size in sizes.items() if size}
    given = {BETWEEN: machines.interconnect, DISK: machines.disk}
    rates |= {part: Rate(rate * GB, GIVEN) for part, rate in given.items() if rate}
    return Hardware(**facts, rates=rates, price=None if on_cpu else machines.price)


def narrow_dtype(machines: HardwareOptions) -> str:
    """The narrow dtype to compute in: bf16, or fp16 on GPUs without bf16."""
    gpu = machines.accelerator
    return "bf16" if gpu is None or gpu.bf16 else "fp16"


@dataclass(frozen=True, kw_only=True)
class Margins:
    """Memory that a GPU loses: bytes outside tensors, and a share of tensors' bytes between them.
    headroom: share of a GPU's memory that advice leaves free if it can."""

    overhead: int = LOST_BESIDE
    fragmentation: float = LOST_BETWEEN
    source: str = "assumed until measured"
    headroom: float = HEADROOM

    def of(self, tensors: int) -> int:
        """Bytes of a device for `tensors` bytes of tensors."""
        return round(tensors * (1 + self.fragmentation)) + self.overhead


def margins_for(
    kind: str | None, *, record: Path | None, overhead: float | None, runs: Path = RUNS
) -> Margins:
    """Margins of GPUs of a kind: by the record of a named run, else of the newest run in the folder
    of runs, else assumed; `overhead` GiB replace the bytes outside tensors. Raises UsageError for a
    missing record, or one of another kind."""
    from pipeline.execution.gpu_records import newest_record, read_record

    def is_of(device: str) -> bool:
        known = find_accelerator(device)
        return device == kind or (known is not None and known is find_accelerator(str(kind)))

    found, margins = None, Margins()
    if record is not None:
        found = record.name, read_record(record)
        if kind is not None and not is_of(found[1].device):
            raise UsageError(
                f"--measured {record} is of a run on {found[1].device}, the plan is for {kind}",
                hint="name a run on GPUs of the same kind",
            )
    elif kind is not None:
        found = newest_record(
            runs,
            lambda one: one.allocated_bytes >= FULL_ENOUGH * one.device_bytes and is_of(one.device),
        )
    if found is not None:
        run, measured = found
        lost = max(measured.reserved_bytes / measured.allocated_bytes - 1, 0.0)
        margins = Margins(
            overhead=measured.beside_bytes, fragmentation=lost, source=f"measured by run {run}",
            headroom=0.0,
        )  # fmt: skip
    return margins if overhead is None else replace(margins, overhead=round(overhead * GIB))

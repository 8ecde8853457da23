"""The machine report: inventory, measurements and findings, as JSON, and as text for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import click
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.errors import UsageError, first_validation_error, system_errors_as
from pipeline.utils.foreign import read_whole
from pipeline.utils.text import align, human, plural

SCHEMA_VERSION: Final = 1
Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PerSecond = Annotated[float, Field(ge=1, allow_inf_nan=False)]
Rate = PerSecond | None
"""Bytes or operations per second; None if not measured."""

Row = tuple[str, str]
UNKNOWN = "-"
WIDTH = 100
RATES = {
    "host_copy": "copy in host memory",
    "h2d": "host to GPU, page-locked",
    "d2h": "GPU to host, page-locked",
    "disk_write": "disk, written, synced",
    "disk_read": "disk, read, cache dropped",
}


class Record(BaseModel):
    """Part of a report. Unknown keys are ignored, so that later versions can add some."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Device(Record):
    """A GPU; `compute_capability` such as `9.0`, `number` as nvidia-smi counts."""

    name: str
    memory_bytes: Count
    compute_capability: str | None
    memory_free_bytes: Count | None = None
    number: Count | None = None


class Collective(Record):
    """A collective on `bytes` bytes: the reduced tensor, or the whole gathered one. `algbw` is
    bytes / seconds, `busbw` the rate of the busiest link."""

    bytes: Count
    seconds: Positive
    algbw: PerSecond
    busbw: PerSecond


class Matmul(Record):
    """Floating-point operations per second of one process in matrix products, by dtype."""

    fp32: Rate
    bf16: Rate
    fp16: Rate = None


class Link(Record):
    """The path between GPUs `a` and `b`, named as by nvidia-smi: NV18, PIX, PXB, PHB, NODE, SYS."""

    a: str
    b: str
    kind: str

    @property
    def is_nvlink(self) -> bool:
        """Whether it is NVLink (NV4 is four links); NODE and the like are PCIe."""
        return self.kind.startswith("NV")


class Topology(Record):
    """Links between GPUs, and each GPU's NUMA node; both empty if unknown."""

    links: tuple[Link, ...] = ()
    numa: dict[str, str] = {}


class Host(Record):
    """The host; `cores` are usable by processes here."""

    system: str | None = None
    processor: str | None = None
    cores: Positive | None = None
    memory_free_bytes: Count | None = None


class Limit(Record):
    """A limit of `ulimit`; None is unlimited. Locked memory is in bytes."""

    soft: Count | None
    hard: Count | None


class Kernel(Record):
    """Limits (open_files, locked_memory, processes) and settings of the kernel.
    `processes_in_group` is the control group's limit of processes and threads; `locks_freely` is
    true for a user without a limit of locked memory."""

    limits: dict[str, Limit] = {}
    processes_in_group: Count | None = None
    locks_freely: bool | None = None
    shared_memory_bytes: Count | None = None
    shared_memory_free_bytes: Count | None = None


class Software(Record):
    """Versions; `torch_cuda` and `nccl` are the versions that torch was built with, `needs_torch`
    the torch that a package was built for, `torch_problem` why torch cannot be imported or use the
    GPUs, `gpus` how many the driver shows to a process here."""

    python: str | None = None
    packages: dict[str, str] = {}
    needs_torch: dict[str, str] = {}
    torch_cuda: str | None = None
    torch_problem: str | None = None
    nccl: str | None = None
    driver: str | None = None
    gpus: Count | None = None


class Operators(Record):
    """Paths of the tools that compile DeepSpeed's operators; None if a tool is missing."""

    compiler: str | None = None
    ninja: str | None = None
    cuda_home: str | None = None
    libaio: bool = False


class Folder(Record):
    """A folder that runs write to, and the file system it is on."""

    use: Literal["runs", "temporary files"]
    path: str
    filesystem: str | None
    free_bytes: Count | None
    writable: bool


class Interface(Record):
    """A network interface that is up, other than loopback."""

    name: str
    bits_per_s: Positive | None


class Network(Record):
    """Network interfaces, and RDMA devices (InfiniBand, RoCE)."""

    interfaces: tuple[Interface, ...] = ()
    rdma: tuple[str, ...] = ()


class Failure(Record):
    """A measurement that failed or gave partial results; `late` if it reached its time limit.
    `printed` is the end of its process's output."""

    measurement: str
    reason: str
    late: bool = False
    printed: str = ""


class MachineReport(Record):
    """A machine. Fields without a default are required in a file; null is unknown.

    Rates are of one process while `procs` do the same; the disk is measured by one only."""

    schema_version: Literal[1] = SCHEMA_VERSION
    devices: tuple[Device, ...]
    procs: Annotated[int, Field(ge=1)]
    host_memory_bytes: Count | None
    matmul_flops: Matmul
    allreduce: tuple[Collective, ...]
    allgather: tuple[Collective, ...]
    host_copy_bytes_per_s: Rate
    h2d_bytes_per_s: Rate
    d2h_bytes_per_s: Rate
    disk_write_bytes_per_s: Rate
    disk_read_bytes_per_s: Rate

    device: Literal["cpu", "cuda"] = "cpu"
    taken: str | None = None
    host: Host = Host()
    load: Annotated[float, Field(ge=0)] | None = None
    """Processes of others that ran or waited in the minute before, for each core."""
    topology: Topology = Topology()
    network: Network = Network()
    software: Software = Software()
    operators: Operators | None = None
    kernel: Kernel = Kernel()
    folders: tuple[Folder, ...] = ()
    environment: dict[str, str] = {}
    failures: tuple[Failure, ...] = ()

    @property
    def gpus(self) -> dict[str, Device]:
        """Devices by the topology's names: `GPU` and nvidia-smi's number, or else the index."""
        pairs = enumerate(self.devices)
        return {f"GPU{i if gpu.number is None else gpu.number}": gpu for i, gpu in pairs}


class Finding(Record):
    """Something that makes training fail (error), slow or fragile (warning), or is worth knowing
    (note): what was `seen`, `why` it matters, what to `do`."""

    severity: Severity
    name: str
    seen: str
    why: str
    do: str


def read_machine(path: Path) -> MachineReport:
    """The report in a file that `pipe doctor --out` wrote. Raises UsageError for any other file."""
    with system_errors_as(UsageError):
        content = read_whole(path)
    try:
        return MachineReport.model_validate_json(content)
    except ValidationError as error:
        raise UsageError(
            f"{path} does not describe a machine: {first_validation_error(error)}",
            hint=f"pipe doctor --out {path} writes such a file",
        ) from error


def lines(machine: MachineReport, findings: Sequence[Finding]) -> Iterator[str]:
    """The report line by line; `findings` in the given order."""
    each = ", per GPU" if machine.device == "cuda" else ", per process"
    processes = plural(machine.procs, "process") + (each if machine.procs > 1 else "")
    tools, environment = machine.operators, machine.environment.items()
    memory = [("memory", _size(machine.host_memory_bytes))]
    yield from _section("machine", memory, _facts(machine.host))
    yield from _section("GPUs", _gpus(machine))
    speeds = ((one.name, one.bits_per_s) for one in machine.network.interfaces)
    links = [(n, UNKNOWN if s is None else f"{s / 1e9:g} Gbit/s") for n, s in speeds]
    rdma = ", ".join(machine.network.rdma)
    yield from _section("network", links, [("RDMA", rdma)] if rdma else ())
    yield from _section("software", _facts(machine.software), machine.software.packages.items())
    yield from _section("operators", _facts(tools) if tools else ())
    soft = ((name, one.soft) for name, one in machine.kernel.limits.items())
    limits = [
        (
            name.replace("_", " "),
            "unlimited" if most is None else human(most) if name == "locked_memory" else str(most),
        )
        for name, most in soft
    ]
    yield from _section("limits", limits, _facts(machine.kernel))
    yield from _section("environment", environment)
    yield from _section(
        "folders",
        (
            (one.use, f"{one.path} ({one.filesystem or UNKNOWN}, {_size(one.free_bytes)} free)")
            for one in machine.folders
        ),
    )
    yield from _section(f"measured, {processes}", _rates(machine))
    yield from _collectives(machine)
    yield "what will hurt"
    for finding in findings:
        texts = f"{finding.severity}: {finding.name}: {finding.seen}", f"why: {finding.why}"
        for text, indent in zip((*texts, f"do:  {finding.do}"), (2, 4, 4), strict=True):
            first, rest = " " * indent, " " * (indent + 5)
            yield click.wrap_text(text, WIDTH, initial_indent=first, subsequent_indent=rest)
        yield ""
    counts = Counter(finding.severity for finding in findings)
    counted = (plural(counts[name], name) for name in SEVERITIES if counts[name])
    yield f"  {', '.join(counted) or 'nothing'}"


def _section(title: str, *parts: Iterable[Row]) -> Iterator[str]:
    rows = [row for part in parts for row in part]
    if rows:
        yield from (title, *(f"  {line}" for line in align(rows, left=2)), "")


def _facts(record: Record) -> Iterator[Row]:
    """The known numbers and texts of a record by name; names in `_bytes` are sizes."""
    for name, value in record:
        label = name.removesuffix("_bytes").replace("_", " ")
        if isinstance(value, bool):
            yield label, "yes" if value else "no"
        elif isinstance(value, int | float):
            yield label, human(value) if name.endswith("_bytes") else f"{value:g}"
        elif isinstance(value, str):
            yield label, value


def _gpus(machine: MachineReport) -> Iterator[Row]:
    if not machine.devices and machine.software.gpus:
        yield "driver", f"{plural(machine.software.gpus, 'GPU')}, none usable by torch"
    elif not machine.devices:
        yield "none", "training runs on the processor"
    for name, device in machine.gpus.items():
        free = f", {human(device.memory_free_bytes)} free" if device.memory_free_bytes else ""
        capability = f"compute capability {device.compute_capability or UNKNOWN}"
        yield name, f"{device.name}, {human(device.memory_bytes)}{free}, {capability}"
    yield from ((f"{link.a}-{link.b}", link.kind) for link in machine.topology.links)
    yield from ((gpu, f"NUMA node {node}") for gpu, node in machine.topology.numa.items())


def _rates(machine: MachineReport) -> Iterator[Row]:
    for dtype, flops in machine.matmul_flops:
        if flops is not None or dtype != "fp16":
            rate = UNKNOWN if flops is None else f"{flops / 1e12:.3f} TFLOP/s"
            yield f"matrix products, {dtype}", rate
    for name, label in RATES.items():
        if machine.device == "cuda" or "2" not in name:
            yield label, _size(getattr(machine, f"{name}_bytes_per_s"), "/s")


def _collectives(machine: MachineReport) -> Iterator[str]:
    backend = "NCCL" if machine.device == "cuda" else "gloo"
    for name, rows in (("all-reduce", machine.allreduce), ("all-gather", machine.allgather)):
        if rows:
            table = [("size", "time", "algorithm bandwidth", "bus bandwidth")]
            for row in rows:
                rates = _size(row.algbw, "/s"), _size(row.busbw, "/s")
                table.append((_binary(row.bytes), f"{row.seconds * 1e3:.3f} ms", *rates))
            yield f"{name}, {plural(machine.procs, 'process')} ({backend})"
            yield from (f"  {line}" for line in align(table, left=0))
            yield f"  latency: {rows[0].seconds * 1e6:.0f} us, at {_binary(rows[0].bytes)}"
            yield ""
    if machine.procs == 1:
        yield from ("one process: no all-reduce, no all-gather (--procs 2)", "")


def _size(size: float | None, per: str = "") -> str:
    return UNKNOWN if size is None else f"{human(size)}{per}"


def _binary(size: int) -> str:
    return f"{size / 2**20:.4g} MiB" if size >= 2**20 else f"{size / 2**10:.4g} KiB"

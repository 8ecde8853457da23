"""The machine report: inventory, measurements and findings, and the JSON that holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.errors import UsageError, in_words

SCHEMA_VERSION: Final = 1

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PerSecond = Annotated[float, Field(ge=1, allow_inf_nan=False)]
Rate = PerSecond | None
"""Bytes or operations per second; None if not measured."""


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
    """One collective on a tensor of `bytes` bytes: the reduced tensor, or the whole gathered one.

    `algbw` is bytes / seconds, `busbw` the rate of the busiest link; both in bytes per second.
    """

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


class Topology(Record):
    """Links between GPUs, and each GPU's NUMA node; both empty if unknown."""

    links: tuple[Link, ...] = ()
    numa: dict[str, str] = {}


class Host(Record):
    """The host; `cores` are those that processes here may use, `cores_present` all."""

    system: str | None = None
    processor: str | None = None
    cores: Positive | None = None
    cores_present: Count | None = None
    numa_nodes: Count | None = None
    memory_free_bytes: Count | None = None
    swap_bytes: Count | None = None
    swap_used_bytes: Count | None = None


class Limit(Record):
    """A limit of `ulimit`; None is unlimited. Locked memory and core dumps are in bytes."""

    soft: Count | None
    hard: Count | None


class Kernel(Record):
    """Limits and settings of the kernel.

    `limits` has open_files, locked_memory, processes and core. `processes_in_group` is the control
    group's limit of processes and threads. `locks_freely` is true for a user who is exempt from the
    limit of locked memory.
    """

    limits: dict[str, Limit] = {}
    processes_in_group: Count | None = None
    locks_freely: bool | None = None
    shared_memory_bytes: Count | None = None
    shared_memory_free_bytes: Count | None = None
    transparent_huge_pages: str | None = None
    overcommit_memory: Count | None = None


class Software(Record):
    """Versions of packages (`packages`), of the CUDA and NCCL that torch was built with, of the
    driver.

    `needs_torch` is the torch that a package was built for; `torch_problem` why torch cannot be
    imported or cannot use the GPUs; `gpus` how many the driver shows to a process here.
    """

    python: str | None = None
    packages: dict[str, str] = {}
    needs_torch: dict[str, str] = {}
    torch_cuda: str | None = None
    torch_problem: str | None = None
    nccl: str | None = None
    driver: str | None = None
    gpus: Count | None = None


class Operators(Record):
    """Paths of the tools that compile DeepSpeed's operators; None if a tool is missing, and
    `known` is false if none was looked for."""

    known: bool = False
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
    """A measurement that failed, or gave only a part of its results.

    `late` is true if it reached its time limit; `printed` is the end of its process's output.
    """

    measurement: str
    reason: str
    late: bool = False
    printed: str = ""


class MachineReport(Record):
    """A machine. Fields without a default are required in a file, with null if unknown.

    Rates are those of one process while `procs` processes do the same; the disk is measured by one
    process alone. `taken` is the time in ISO form.
    """

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

    h2d_pageable_bytes_per_s: Rate = None
    d2h_pageable_bytes_per_s: Rate = None
    device: Literal["cpu", "cuda"] = "cpu"
    taken: str | None = None
    host: Host = Host()
    topology: Topology = Topology()
    network: Network = Network()
    software: Software = Software()
    operators: Operators = Operators()
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
    """Something that makes training fail or slow: what was `seen`, `why` it matters, what to `do`.

    An error makes training fail, a warning makes it slow or may make it fail later, a note is worth
    knowing. `name` is the finding's name in docs/doctor.md.
    """

    severity: Literal["error", "warning", "note"]
    name: str
    seen: str
    why: str
    do: str


def read_machine(path: Path) -> MachineReport:
    """The report in a file that `pipe doctor --out` wrote. Raises UsageError for any other file."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = in_words(error) if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"{path} cannot be read: {reason}") from error
    try:
        return MachineReport.model_validate_json(text)
    except ValidationError as error:
        raise UsageError(
            f"{path} does not describe a machine: {_first_problem(error)}",
            hint=f"pipe doctor --out {path} writes such a file",
        ) from error


def _first_problem(error: ValidationError) -> str:
    problems = error.errors()
    unknown = (problem for problem in problems if problem["loc"] == ("schema_version",))
    if version := next(unknown, None):
        return f"schema_version {version['input']!r} is not known, only {SCHEMA_VERSION}"
    problem = problems[0]
    place = ".".join(map(str, problem["loc"]))
    match problem["type"]:
        case "json_invalid":
            return "it is not JSON"
        case "missing":
            return f"{place} is missing"
    return f"{place}: {problem['msg']}" if place else problem["msg"]

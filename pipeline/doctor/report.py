"""Findings and measurements of a machine; the JSON that `pipe doctor` writes."""

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
"""Bytes or operations per second; None where it was not measured."""


class Record(BaseModel):
    """Keys that are not known are passed over, so that later versions can add some."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Device(Record):
    """A GPU. `compute_capability` as in `9.0`; `number` is nvidia-smi's."""

    name: str
    memory_bytes: Count
    compute_capability: str | None
    memory_free_bytes: Count | None = None
    number: Count | None = None


class Collective(Record):
    """One collective operation on `bytes` bytes: the tensor that is reduced, or the whole that is
    gathered. `algbw` is bytes / seconds; `busbw` is what the busiest link carried (bandwidth.py);
    both in bytes per second."""

    bytes: Count
    seconds: Positive
    algbw: PerSecond
    busbw: PerSecond


class Matmul(Record):
    """Floating-point operations per second of one process, in matrix products of a dtype."""

    fp32: Rate
    bf16: Rate
    fp16: Rate = None


class Link(Record):
    """How GPUs `a` and `b` reach each other, in nvidia-smi's words and with its numbers: NV18, PIX,
    PXB, PHB, NODE, SYS."""

    a: str
    b: str
    kind: str


class Topology(Record):
    """`numa` has the memory node of a GPU; both are empty where nothing tells."""

    links: tuple[Link, ...] = ()
    numa: dict[str, str] = {}


class Host(Record):
    """The machine and its system. `cores` are what a process here may use, `cores_present` all."""

    system: str | None = None
    processor: str | None = None
    cores: Positive | None = None
    cores_present: Count | None = None
    numa_nodes: Count | None = None
    memory_free_bytes: Count | None = None
    swap_bytes: Count | None = None
    swap_used_bytes: Count | None = None


class Limit(Record):
    """A limit of the shell's `ulimit`; None is unlimited. Locked memory and core in bytes."""

    soft: Count | None
    hard: Count | None


class Kernel(Record):
    """`limits` by name (open_files, locked_memory, processes, core). `processes_in_group` is what a
    control group (a container, a job) allows of processes and threads together. `locks_freely`: the
    limit of locked memory does not hold for this user."""

    limits: dict[str, Limit] = {}
    processes_in_group: Count | None = None
    locks_freely: bool | None = None
    shared_memory_bytes: Count | None = None
    shared_memory_free_bytes: Count | None = None
    transparent_huge_pages: str | None = None
    overcommit_memory: Count | None = None


class Software(Record):
    """`packages`: version by name. `needs_torch`: the torch that a package was built for.

    `torch_cuda` and `nccl` are what torch was built with; `torch_problem` is why it cannot be
    imported or cannot use the GPUs, in its own words. `gpus` are those of the driver that a process
    here would see.
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
    """Programs that compile DeepSpeed's operators: paths, None where there is none."""

    known: bool = False
    compiler: str | None = None
    ninja: str | None = None
    cuda_home: str | None = None
    libaio: bool = False


class Folder(Record):
    """A place that is written to; `use` says for what."""

    use: Literal["runs", "temporary files"]
    path: str
    filesystem: str | None
    free_bytes: Count | None
    writable: bool


class Interface(Record):
    """A network interface that is up, loopback left out."""

    name: str
    bits_per_s: Positive | None


class Network(Record):
    """`rdma`: the devices that reach other machines' memory (InfiniBand, RoCE)."""

    interfaces: tuple[Interface, ...] = ()
    rdma: tuple[str, ...] = ()


class Failure(Record):
    """A measurement without a result, or without all of it, and why. `late`: its time was up, so
    it may only be slow. `printed` is what its process printed last."""

    measurement: str
    reason: str
    late: bool = False
    printed: str = ""


class MachineReport(Record):
    """A machine. What has no default must be in a file, with null where it is not known.

    Rates are of one process while `procs` of them do the same, but for the disk's, which are of one
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
        """The devices by name, as the topology has them: `GPU` and nvidia-smi's number; their place
        where it has told none."""
        places = enumerate(self.devices)
        return {f"GPU{place if one.number is None else one.number}": one for place, one in places}


def read_machine(path: Path) -> MachineReport:
    """The machine that `pipe doctor --out` described; raises UsageError for any other file."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = in_words(error) if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"{path} cannot be read: {reason}") from error
    try:
        return MachineReport.model_validate_json(text)
    except ValidationError as error:
        raise UsageError(
            f"{path} does not describe a machine: {_first(error)}",
            hint=f"pipe doctor --out {path} writes such a file",
        ) from error


def _first(error: ValidationError) -> str:
    """The first thing that is wrong, a version that this program does not know before everything
    else."""
    problems = error.errors()
    for problem in problems:
        if problem["loc"] == ("schema_version",):
            return f"schema_version {problem['input']!r} is not known, only {SCHEMA_VERSION}"
    problem = problems[0]
    if problem["type"] == "json_invalid":
        return "it is not JSON"
    place = ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        return f"{place} is missing"
    return f"{place}: {problem['msg']}" if place else problem["msg"]

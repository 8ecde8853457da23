"""The machine report: inventory, measurements and findings, with the JSON that holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.errors import UsageError, first_validation_error, system_errors_as
from pipeline.utils.foreign import read_whole

SCHEMA_VERSION: Final = 1
Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
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

"""Fill a MachineReport: the inventory, and the measurements one after another.

A measurement that fails or reaches its time limit costs no other.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click

from pipeline.doctor import inventory
from pipeline.doctor.measurements import bandwidth, measure
from pipeline.doctor.report import (
    Device,
    Failure,
    Folder,
    Link,
    MachineReport,
    Matmul,
    Topology,
)
from pipeline.errors import UsageError
from pipeline.hardware.gpus import gpu_count
from pipeline.hardware.host import free_memory, total_memory, usable_cores
from pipeline.utils.text import plural

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SHARE_OF_DISK = 10
"""The measured file takes at most a tenth of the free space."""
SHARE_OF_MEMORY = 4
"""A buffer takes at most a quarter of a process's free memory; an operation has about three."""
CUDA_FACTOR = 2
"""Factor of all times with GPUs: CUDA and NCCL take seconds to start in every process."""
TORCH_SECONDS = 40.0
"""Time limit of importing torch, apart from the total: a slow disk takes as long with `--quick`,
and later processes find the files in memory."""
LIMITS = {"disk": 0.3, "matmul": 0.4, "copies": 0.3, "collectives": 0.7}
"""Time limit of each measurement, as a share of the total."""


@dataclass(frozen=True, kw_only=True)
class MeasurementBudget:
    """Bytes and seconds of the measurements; `total` is all but importing torch."""

    sizes: tuple[int, ...]
    """Bytes of the collectives."""
    copy_bytes: int
    disk_bytes: int
    seconds: Mapping[str, float]
    """Time of one repeated operation, by measurement; the disk's of writing and of reading each."""
    total: float


FULL = MeasurementBudget(
    sizes=(64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    copy_bytes=256 * MIB,
    disk_bytes=GIB,
    seconds={"collectives": 0.3, "matmul": 1.0, "copies": 1.0, "disk": 4.0},
    total=55.0,
)
QUICK = MeasurementBudget(
    sizes=(64 * KIB, MIB, 16 * MIB, 64 * MIB),
    copy_bytes=64 * MIB,
    disk_bytes=256 * MIB,
    seconds={"collectives": 0.1, "matmul": 0.3, "copies": 0.2, "disk": 1.0},
    total=18.0,
)


@dataclass(kw_only=True)
class Session:
    """The measurements of one `pipe doctor`. Set `procs` and `device` after `torch`."""

    budget: MeasurementBudget
    gpus: bool
    """Whether there are GPUs, with which everything takes longer."""
    procs: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    failures: list[Failure] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    def torch(self) -> dict[str, Any]:
        """Facts that torch and the driver report, or none. The total time begins after it."""
        found = _merged(self._run("torch", procs=1))
        self._began = time.monotonic()
        return found

    def measure(self, runs: Folder) -> dict[str, Any]:
        """The measured fields of a report."""
        rates: dict[str, float] = {}
        size = min(self.budget.disk_bytes, (runs.free_bytes or 0) // SHARE_OF_DISK)
        if runs.writable and size >= MIB:
            rates = _merged(self._run("disk", procs=1, folder=runs.path, size=size))
        else:
            reason = "it has no space left" if runs.writable else "it cannot be written to"
            self._fail("disk", f"{runs.path}: {reason}")
        dtypes = ["fp32", "bf16", *(["fp16"] if self.device == "cuda" else [])]
        matmul = _merged(self._run("matmul", dtypes=dtypes))
        rates |= _merged(self._run("copies", size=min(self.budget.copy_bytes, self._buffer())))
        fields: dict[str, Any] = {"allreduce": [], "allgather": []}
        if self.procs > 1:
            sizes = [size for size in self.budget.sizes if size <= self._buffer()]
            for record in self._run("collectives", sizes=sizes):
                fields[record["operation"]].append(bandwidth(**record, procs=self.procs))
        names = (name for name in MachineReport.model_fields if name.endswith("_bytes_per_s"))
        fields |= {name: rates.get(name) for name in names}
        return {**fields, "matmul_flops": Matmul(**{"fp32": None, "bf16": None, **matmul})}

    def _buffer(self) -> int:
        """Bytes of the largest buffer in each process."""
        return free_memory() // self.procs // SHARE_OF_MEMORY

    def _run(self, name: str, procs: int = 0, **settings: Any) -> Sequence[Mapping[str, Any]]:
        """Return the records of all ranks, which may be partial; a failure is noted."""
        factor = CUDA_FACTOR if self.gpus else 1
        seconds = TORCH_SECONDS * factor
        if name != "torch":
            total = self.budget.total * factor
            left = self._began + total - time.monotonic()
            if left < 1:
                self._fail(name, "no time was left for it", late=True)
                return ()
            seconds = min(left, LIMITS[name] * total)
            settings["budget"] = self.budget.seconds[name]
        click.echo(f"measuring: {name}", err=True)
        settings["device"] = self.device
        target = f"pipeline.doctor.measurements:measure_{name}"
        done = measure(target, settings, procs=procs or self.procs, seconds=seconds)
        if done.failure:
            self._fail(name, done.failure, late=done.late, printed=done.printed)
        return [record for rank in done.records for record in rank]

    def _fail(self, name: str, reason: str, *, late: bool = False, printed: str = "") -> None:
        failure = Failure(measurement=name, reason=reason, late=late, printed=printed)
        self.failures.append(failure)


def _merged(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Values by name; all ranks record the same ones."""
    return {name: value for record in records for name, value in record.items()}


def examine(runs: Path, *, procs: int | None, quick: bool) -> MachineReport:
    """Inspect and measure this machine with `procs` processes (None: one per GPU, or two). Progress
    is printed to standard error. Raises UsageError if there are fewer GPUs than `procs`."""
    load = _load()  # before anything of this program adds to it
    places = inventory.folders(runs)
    session = Session(budget=QUICK if quick else FULL, gpus=gpu_count() > 0)
    torch = session.torch()
    devices = _devices(torch.get("devices", ()), torch.get("uuids", ()))
    if devices:
        session.device, session.gpus = "cuda", True  # some GPUs only torch knows
        if procs is not None and procs > len(devices):
            raise UsageError(
                f"--procs {procs}, but this machine has {plural(len(devices), 'GPU')}",
                hint="measure its processors instead: CUDA_VISIBLE_DEVICES= pipe doctor",
            )
    session.procs = procs or len(devices) or max(1, min(2, int(usable_cores())))
    return MachineReport(
        **session.measure(places[0]),
        device=session.device,
        devices=devices,
        procs=session.procs,
        taken=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        host_memory_bytes=total_memory(),
        host=inventory.host(),
        load=load,
        topology=_topology(torch, {each.number for each in devices}),
        network=inventory.network(),
        software=inventory.software(torch),
        operators=inventory.operators(),
        kernel=inventory.kernel(),
        folders=places,
        environment=inventory.environment(os.environ),
        failures=tuple(session.failures),
    )


def _load() -> float | None:
    """Other processes that ran or waited in the last minute, for each core of the machine."""
    with contextlib.suppress(OSError):
        return max(os.getloadavg()[0] - 1, 0.0) / (os.cpu_count() or 1)
    return None


def _topology(found: Mapping[str, Any], numbers: Collection[int | None]) -> Topology:
    """Links between the GPUs with these numbers, and their NUMA nodes."""
    links = [Link(a=f"GPU{a}", b=f"GPU{b}", kind=kind) for a, b, kind in found.get("links", ())
             if a in numbers and b in numbers]  # fmt: skip
    nodes = found.get("numa_nodes", {}).items()
    numa = {f"GPU{number}": str(node) for number, node in nodes if int(number) in numbers}
    return Topology(links=tuple(links), numa=numa)


def _devices(found: Sequence[Mapping[str, Any]], uuids: Sequence[str]) -> tuple[Device, ...]:
    """torch's devices with the driver's numbers, if it knows the UUIDs of all."""
    numbers = {uuid: number for number, uuid in enumerate(uuids)}
    known = all(device.get("uuid") in numbers for device in found)
    return tuple(
        Device(**device, number=numbers[device["uuid"]] if known else None) for device in found
    )

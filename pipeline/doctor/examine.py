"""The inventory, then one measurement after the other."""

from __future__ import annotations

import datetime
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeline.doctor import bandwidth
from pipeline.doctor.folders import folders
from pipeline.doctor.host import host
from pipeline.doctor.kernel import environment, kernel
from pipeline.doctor.network import network
from pipeline.doctor.pace import CUDA_FACTOR, FULL, LIMITS, MIB, QUICK, Pace
from pipeline.doctor.ranks import Told, measure
from pipeline.doctor.report import Collective, Device, Failure, Folder, Machine, Matmul
from pipeline.doctor.software import operators, software, topology
from pipeline.errors import UsageError
from pipeline.machine import free_memory, total_memory, usable_cores

SHARE_OF_DISK = 10
"""Of the free space, the file that is measured with takes one in so many bytes at most."""
SHARE_OF_MEMORY = 4
"""Of a process's share of the free memory, likewise a buffer; an operation takes about three."""


def examine(runs: Path, *, procs: int | None, quick: bool, say: Callable[[str], None]) -> Machine:
    """Look at this machine and measure it with `procs` processes (None: one per GPU, or two).

    `say` is told what is measured next. Raises UsageError if there are fewer GPUs than `procs`.
    """
    pace = QUICK if quick else FULL
    session = _Session(until=time.monotonic() + pace.total, say=say)
    torch = _torch(session.measure("torch", "torch_facts", pace, {}))
    devices = tuple(Device.model_validate(each) for each in torch.get("devices", ()))
    device: Literal["cpu", "cuda"] = "cuda" if devices else "cpu"
    if device == "cuda":
        session.until += pace.total * (CUDA_FACTOR - 1)
    count = _count(procs, len(devices))
    places = folders(runs)
    disk = session.disk(places[0], pace)
    matmul = session.matmul(device, count, pace)
    copies = session.copies(device, count, pace)
    reduced, gathered = session.collectives(device, count, pace)
    return Machine(
        device=device,
        devices=devices,
        procs=count,
        taken=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        host_memory_bytes=total_memory(),
        matmul_flops=matmul,
        allreduce=reduced,
        allgather=gathered,
        **_rates(("host_copy", "h2d", "d2h", "h2d_pageable", "d2h_pageable"), copies),
        **_rates(("disk_write", "disk_read"), disk),
        host=host(),
        topology=topology(),
        network=network(),
        software=software(torch),
        operators=operators(),
        kernel=kernel(),
        folders=places,
        environment=environment(os.environ),
        failures=tuple(session.failures),
    )


def _count(procs: int | None, gpus: int) -> int:
    if gpus and procs is not None and procs > gpus:
        raise UsageError(
            f"--procs {procs}, but this machine has {gpus} {'GPU' if gpus == 1 else 'GPUs'}",
            hint="measure its processors instead: CUDA_VISIBLE_DEVICES= pipe doctor",
        )
    return procs or gpus or max(1, min(2, int(usable_cores())))


@dataclass(kw_only=True)
class _Session:
    """Measurements within one time, and what became of those that failed."""

    until: float
    say: Callable[[str], None]
    failures: list[Failure] = field(default_factory=list)

    def measure(
        self, name: str, module: str, pace: Pace, settings: Mapping[str, Any], procs: int = 1
    ) -> Told:
        self.say(name)
        left = self.until - time.monotonic()
        if left < 1:
            return self._failed(name, Told(records=(), failure="no time was left for it"))
        target = f"pipeline.doctor.{module}:measure"
        seconds = min(left, LIMITS[name] * pace.total)
        told = measure(target, settings, procs=procs, seconds=seconds)
        return self._failed(name, told) if told.failure else told

    def _failed(self, name: str, told: Told) -> Told:
        failure = Failure(measurement=name, reason=told.failure, printed=told.printed)
        self.failures.append(failure)
        return told

    def disk(self, folder: Folder, pace: Pace) -> dict[str, float]:
        size = min(pace.disk_bytes, (folder.free_bytes or 0) // SHARE_OF_DISK)
        settings = {"folder": folder.path, "size": size, "budget": pace.disk_seconds}
        if not folder.writable or size < MIB:
            reason = "no space is left in it" if folder.writable else "it cannot be written to"
            self.failures.append(Failure(measurement="disk", reason=f"{folder.path}: {reason}"))
            return {}
        return _slowest(self.measure("disk", "disk", pace, settings).all_records)

    def matmul(self, device: str, procs: int, pace: Pace) -> Matmul:
        dtypes = ["fp32", "bf16", *(["fp16"] if device == "cuda" else [])]
        settings = {"device": device, "dtypes": dtypes, "budget": pace.matmul_seconds}
        told = self.measure("matmul", "matmul", pace, settings, procs)
        return Matmul.model_validate({"fp32": None, "bf16": None, **_slowest(told.all_records)})

    def copies(self, device: str, procs: int, pace: Pace) -> dict[str, float]:
        size = min(pace.copy_bytes, _room(procs))
        settings = {"device": device, "size": size, "budget": pace.copy_seconds}
        return _slowest(self.measure("copies", "copies", pace, settings, procs).all_records)

    def collectives(
        self, device: str, procs: int, pace: Pace
    ) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
        if procs == 1:
            return (), ()
        sizes = [size for size in pace.sizes if size <= _room(procs)]
        with tempfile.TemporaryDirectory(prefix="pipe-doctor-") as folder:
            settings = {
                "device": device,
                "store": f"{folder}/store",
                "sizes": sizes,
                "budget": pace.collective_seconds,
            }
            records = self.measure("collectives", "collectives", pace, settings, procs).all_records

        def of(name: str, make: Callable[[int, float, int], Collective]) -> tuple[Collective, ...]:
            mine = [record for record in records if record["operation"] == name]
            return tuple(make(record["bytes"], record["seconds"], procs) for record in mine)

        return of("allreduce", bandwidth.allreduce), of("allgather", bandwidth.allgather)


def _room(procs: int) -> int:
    """Bytes of a buffer that every process may have."""
    return free_memory() // procs // SHARE_OF_MEMORY


def _torch(told: Told) -> dict[str, Any]:
    """What torch says about itself, or why it says nothing."""
    return told.all_records[0] if told.all_records else {"problem": told.failure}


def _slowest(records: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Of every rate, that of the process which was slowest."""
    slowest: dict[str, float] = {}
    for record in records:
        for name, rate in record.items():
            slowest[name] = min(rate, slowest.get(name, rate))
    return slowest


def _rates(names: Iterable[str], found: Mapping[str, float]) -> dict[str, Any]:
    """All fields of that kind, None for what was not measured."""
    return {f"{name}_bytes_per_s": found.get(f"{name}_bytes_per_s") for name in names}

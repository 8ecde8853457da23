"""One measurement after the other, within a time, whatever becomes of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.doctor.ranks import Told, measure
from pipeline.doctor.report import Failure, Folder
from pipeline.hardware.host import free_memory

SHARE_OF_DISK = 10
"""The file that is measured with takes one in so many of the free bytes at most."""
SHARE_OF_MEMORY = 4
"""Likewise a buffer, of a process's share of the free memory; an operation takes about three."""


@dataclass(kw_only=True)
class Session:
    """`procs` and `device` are to be known before all but `torch` and `disk`. Everything may take
    longer where there are `gpus`."""

    pace: MeasurementBudget
    say: Callable[[str], None]
    gpus: bool
    scratch: str | None
    """Folder for measurements' files, if not that of temporary files."""
    procs: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    failures: list[Failure] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    def use_gpus(self) -> None:
        """Measure them from now on, also those that only torch knows of."""
        self.device, self.gpus = "cuda", True

    def torch(self) -> dict[str, Any]:
        """What torch says about itself (torch_facts.py); nothing if it failed or was late. The
        time of the other measurements begins afterwards."""
        seconds = TORCH_SECONDS * self._patience
        told = self._run("torch", "torch_facts", {}, procs=1, seconds=seconds)
        self._began = time.monotonic()
        return told.all_records[0] if told.all_records else {}

    def disk(self, folder: Folder) -> dict[str, float]:
        """Rates by name, of one process."""
        size = min(self.pace.disk_bytes, (folder.free_bytes or 0) // SHARE_OF_DISK)
        settings = {"folder": folder.path, "size": size, "budget": self.pace.disk_seconds}
        if not folder.writable or size < MIB:
            reason = "no space is left in it" if folder.writable else "it cannot be written to"
            return _slowest(self._failed("disk", Told(failure=f"{folder.path}: {reason}")))
        return _slowest(self._measure("disk", settings, procs=1))

    def matmul(self) -> dict[str, float]:
        """Operations per second by dtype."""
        dtypes = ["fp32", "bf16", *(["fp16"] if self.device == "cuda" else [])]
        settings = {"dtypes": dtypes, "budget": self.pace.matmul_seconds}
        return _slowest(self._measure("matmul", settings))

    def copies(self) -> dict[str, float]:
        """Rates by name."""
        size = min(self.pace.copy_bytes, self._room())
        settings = {"size": size, "budget": self.pace.copy_seconds}
        return _slowest(self._measure("copies", settings))

    def collectives(self) -> tuple[dict[str, Any], ...]:
        """Operation, bytes and seconds of each; nothing for one process."""
        if self.procs == 1:
            return ()
        room = self._room()
        sizes = [size for size in self.pace.sizes if size <= room]
        settings = {"sizes": sizes, "budget": self.pace.collective_seconds}
        return self._measure("collectives", settings).all_records

    def _room(self) -> int:
        """Bytes of a buffer that every process may have."""
        return free_memory() // self.procs // SHARE_OF_MEMORY

    @property
    def _patience(self) -> int:
        return CUDA_FACTOR if self.gpus else 1

    def _measure(self, name: str, settings: Mapping[str, Any], *, procs: int | None = None) -> Told:
        total = self.pace.total * self._patience
        left = self._began + total - time.monotonic()
        if left < 1:
            return self._failed(name, Told(failure="no time was left for it", late=True))
        seconds = min(left, LIMITS[name] * total)
        return self._run(name, name, settings, procs=procs or self.procs, seconds=seconds)

    def _run(
        self, name: str, module: str, settings: Mapping[str, Any], *, procs: int, seconds: float
    ) -> Told:
        self.say(name)
        told = measure(
            f"pipeline.doctor.{module}:measure",
            {"device": self.device, **settings},
            procs=procs,
            seconds=seconds,
            within=self.scratch,
        )
        return self._failed(name, told) if told.failure else told

    def _failed(self, name: str, told: Told) -> Told:
        failure = Failure(
            measurement=name, reason=told.failure, late=told.late, printed=told.printed
        )
        self.failures.append(failure)
        return told


def _slowest(told: Told) -> dict[str, float]:
    """Of every rate, that of the process which was slowest."""
    slowest: dict[str, float] = {}
    for record in told.all_records:
        for name, rate in record.items():
            slowest[name] = min(rate, slowest.get(name, rate))
    return slowest


KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, kw_only=True)
class MeasurementBudget:
    """Bytes of the collective operations, of a copy, of the file; seconds in which each is repeated
    (the disk's of writing, and of reading). `total` bounds all but importing torch."""

    sizes: tuple[int, ...]
    collective_seconds: float
    matmul_seconds: float
    copy_bytes: int
    copy_seconds: float
    disk_bytes: int
    disk_seconds: float
    total: float


FULL = MeasurementBudget(
    sizes=(64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    collective_seconds=0.3,
    matmul_seconds=1.0,
    copy_bytes=256 * MIB,
    copy_seconds=1.0,
    disk_bytes=GIB,
    disk_seconds=4.0,
    total=55.0,
)
QUICK = MeasurementBudget(
    sizes=(64 * KIB, MIB, 16 * MIB, 64 * MIB),
    collective_seconds=0.1,
    matmul_seconds=0.3,
    copy_bytes=64 * MIB,
    copy_seconds=0.2,
    disk_bytes=256 * MIB,
    disk_seconds=1.0,
    total=18.0,
)
CUDA_FACTOR = 2
"""CUDA and NCCL take seconds to start, in every process again."""

TORCH_SECONDS = 40.0
"""After which importing torch is given up. It is apart from the total: a slow disk takes as long
however little is measured, and the next process finds in memory what this one has read."""

LIMITS = {"disk": 0.3, "matmul": 0.4, "copies": 0.3, "collectives": 0.7}
"""Share of the total after which a measurement that has not ended is given up."""

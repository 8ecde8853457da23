"""Run the measurements one after another within a time budget; one that fails costs no other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.doctor.ranks import RankResults, measure
from pipeline.doctor.report import Failure, Folder
from pipeline.hardware.host import free_memory

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SHARE_OF_DISK = 10
"""The measured file takes at most a tenth of the free space."""
SHARE_OF_MEMORY = 4
"""A buffer takes at most a quarter of a process's share of free memory; an operation takes three.
"""
CUDA_FACTOR = 2
"""Factor of all times with GPUs: CUDA and NCCL take seconds to start in every process."""
TORCH_SECONDS = 40.0
"""Time limit of importing torch, apart from the total: a slow disk takes as long with `--quick`,
and later processes find the files in memory."""
TARGETS = {
    "torch": "software:torch_facts",
    "disk": "measurements:disk",
    "matmul": "measurements:matmul",
    "copies": "measurements:copies",
    "collectives": "collectives:measure",
}
"""Function of each measurement."""
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
    """The measurements of one `pipe doctor`. Set `procs` and `device` before all but `torch`."""

    budget: MeasurementBudget
    say: Callable[[str], None]
    """Called with the name of each measurement before it begins."""
    gpus: bool
    """Whether there are GPUs, with which everything takes longer."""
    scratch: str | None
    """Folder for the measurements' files; None for that of temporary files."""
    procs: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    failures: list[Failure] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    def use_gpus(self) -> None:
        """Measure the GPUs from now on, even if only torch knows of them."""
        self.device, self.gpus = "cuda", True

    def torch(self) -> dict[str, Any]:
        """The record of `software.torch_facts`, or nothing. The total time begins after it."""
        results = self._run("torch", {}, procs=1, seconds=TORCH_SECONDS * self._patience)
        self._began = time.monotonic()
        return results.all_records[0] if results.all_records else {}

    def disk(self, folder: Folder) -> dict[str, float]:
        """Rates by name, of one process."""
        size = min(self.budget.disk_bytes, (folder.free_bytes or 0) // SHARE_OF_DISK)
        if not folder.writable or size < MIB:
            reason = "it has no space left" if folder.writable else "it cannot be written to"
            self._fail("disk", RankResults(failure=f"{folder.path}: {reason}"))
            return {}
        return _slowest(self._measure("disk", {"folder": folder.path, "size": size}, procs=1))

    def matmul(self) -> dict[str, float]:
        """Operations per second by dtype."""
        dtypes = ["fp32", "bf16", *(["fp16"] if self.device == "cuda" else [])]
        return _slowest(self._measure("matmul", {"dtypes": dtypes}))

    def copies(self) -> dict[str, float]:
        """Rates by name."""
        size = min(self.budget.copy_bytes, self._buffer())
        return _slowest(self._measure("copies", {"size": size}))

    def collectives(self) -> tuple[dict[str, Any], ...]:
        """Operation, bytes and seconds of each; empty for one process."""
        if self.procs == 1:
            return ()
        largest = self._buffer()
        sizes = [size for size in self.budget.sizes if size <= largest]
        return self._measure("collectives", {"sizes": sizes}).all_records

    def _buffer(self) -> int:
        """Bytes of the largest buffer in each process."""
        return free_memory() // self.procs // SHARE_OF_MEMORY

    @property
    def _patience(self) -> int:
        return CUDA_FACTOR if self.gpus else 1

    def _measure(
        self, name: str, settings: Mapping[str, Any], *, procs: int | None = None
    ) -> RankResults:
        total = self.budget.total * self._patience
        left = self._began + total - time.monotonic()
        if left < 1:
            return self._fail(name, RankResults(failure="no time was left for it", late=True))
        settings = {**settings, "budget": self.budget.seconds[name]}
        seconds = min(left, LIMITS[name] * total)
        return self._run(name, settings, procs=procs or self.procs, seconds=seconds)

    def _run(
        self, name: str, settings: Mapping[str, Any], *, procs: int, seconds: float
    ) -> RankResults:
        self.say(name)
        results = measure(
            f"pipeline.doctor.{TARGETS[name]}",
            {"device": self.device, **settings},
            procs=procs,
            seconds=seconds,
            within=self.scratch,
        )
        return self._fail(name, results) if results.failure else results

    def _fail(self, name: str, results: RankResults) -> RankResults:
        """Note the failure of the measurement; its results may be partial."""
        failure = Failure(
            measurement=name, reason=results.failure, late=results.late, printed=results.printed
        )
        self.failures.append(failure)
        return results


def _slowest(results: RankResults) -> dict[str, float]:
    """The slowest process's rate, for every rate."""
    slowest: dict[str, float] = {}
    for record in results.all_records:
        for name, rate in record.items():
            slowest[name] = min(rate, slowest.get(name, rate))
    return slowest

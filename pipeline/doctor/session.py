"""One measurement after the other, within a time, whatever becomes of each."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.doctor.pace import CUDA_FACTOR, LIMITS, MIB, Pace
from pipeline.doctor.ranks import Told, measure
from pipeline.doctor.report import Failure, Folder
from pipeline.machine import free_memory

SHARE_OF_DISK = 10
"""The file that is measured with takes one in so many of the free bytes at most."""
SHARE_OF_MEMORY = 4
"""Likewise a buffer, of a process's share of the free memory; an operation takes about three."""


@dataclass(kw_only=True)
class Session:
    """`procs` and `device` are to be known before all but `torch` and `disk`."""

    pace: Pace
    say: Callable[[str], None]
    procs: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    failures: list[Failure] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    def use_gpus(self) -> None:
        """Measure them from now on, and take longer."""
        self.device = "cuda"
        self.pace = dataclasses.replace(self.pace, total=self.pace.total * CUDA_FACTOR)

    def torch(self) -> dict[str, Any]:
        """What torch says about itself (torch_facts.py), or as `problem` why it says nothing."""
        told = self._measure("torch", {}, procs=1, module="torch_facts")
        return told.all_records[0] if told.all_records else {"problem": told.failure}

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
        with tempfile.TemporaryDirectory(prefix="pipe-doctor-") as folder:
            settings = {
                "store": f"{folder}/store",
                "sizes": sizes,
                "budget": self.pace.collective_seconds,
            }
            return self._measure("collectives", settings).all_records

    def _room(self) -> int:
        """Bytes of a buffer that every process may have."""
        return free_memory() // self.procs // SHARE_OF_MEMORY

    def _measure(
        self,
        name: str,
        settings: Mapping[str, Any],
        *,
        procs: int | None = None,
        module: str | None = None,
    ) -> Told:
        self.say(name)
        left = self._began + self.pace.total - time.monotonic()
        if left < 1:
            return self._failed(name, Told(failure="no time was left for it", late=True))
        told = measure(
            f"pipeline.doctor.{module or name}:measure",
            {"device": self.device, **settings},
            procs=procs or self.procs,
            seconds=min(left, LIMITS[name] * self.pace.total),
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

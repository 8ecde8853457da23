"""Memory that a GPU needs beyond its tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.accelerators import GIB, find_accelerator
from pipeline.errors import UsageError
from pipeline.memory_record import MemoryRecord, newest_record, read_record

BESIDE = round(1.2 * GIB)
"""Bytes of a GPU in use beside torch's allocator: a CUDA context of 0.3 GiB and libraries' kernels
(github.com/pytorch/pytorch/issues/107667), 0.5 to 0.7 GiB for each communicator of NCCL
(github.com/NVIDIA/nccl/issues/964)."""
BETWEEN = 0.08
"""Share of tensors' bytes that torch's allocator reserves and cannot use. Answer.AI
(github.com/AnswerDotAI/fsdp_qlora, benchmarks_03_2024.md) saw 12 and 24 % with room to spare. More
than 10 % would contradict a QLoRA of 65B on 48 GB (Dettmers et al. 2023): tensors of 42 GiB."""
RUNS = Path("runs")
"""Where runs are, unless they were told to be elsewhere."""
TELLING = 0.25
"""Share of a GPU's memory from which on what its allocator lost says something of a full one."""


@dataclass(frozen=True, kw_only=True)
class Margins:
    """Memory that a GPU loses between tensors and beside them."""

    overhead: int = BESIDE
    """Bytes beside them."""
    fragmentation: float = BETWEEN
    """Share of tensors' bytes between them."""
    source: str = "assumed until measured"
    measured: int | None = None
    """Bytes of tensors at the peak of the run that was named for comparison."""

    def of(self, tensors: int) -> int:
        """Bytes of a device that so many bytes of tensors take in all."""
        return round(tensors * (1 + self.fragmentation)) + self.overhead


def margins_for(
    kind: str | None, *, record: Path | None, overhead: float | None, runs: Path = RUNS
) -> Margins:
    """Margins of GPUs of a kind: by the record of a run that is named, by the newest one in
    the folder of runs, or else what is assumed; `overhead` GiB in place of what is beside tensors.
    Raises UsageError for a record of another kind, or of none."""
    named = None if record is None else (record.name, read_record(record))
    if named is not None and kind is not None and not _same(named[1].device, kind):
        raise UsageError(
            f"--measured {record} is of a run on {named[1].device}, the plan is for {kind}",
            hint="name a run on GPUs of the same kind",
        )
    found = named or (newest_record(runs, lambda one: _tells(one, kind)) if kind else None)
    margins = Margins()
    if found is not None:
        run, held = found
        margins = Margins(
            overhead=held.beside_bytes,
            fragmentation=max(held.reserved_bytes / held.allocated_bytes - 1, 0.0),
            source=f"measured by run {run}",
            measured=held.allocated_bytes if named else None,
        )
    return margins if overhead is None else replace(margins, overhead=round(overhead * GIB))


def _tells(record: MemoryRecord, kind: str) -> bool:
    full = record.allocated_bytes >= TELLING * record.device_bytes
    return full and _same(record.device, kind)


def _same(one: str, other: str) -> bool:
    known = find_accelerator(one)
    return one == other or (known is not None and known is find_accelerator(other))

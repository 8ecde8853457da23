"""How much is measured, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, kw_only=True)
class Pace:
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


FULL = Pace(
    sizes=(64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    collective_seconds=0.3,
    matmul_seconds=1.0,
    copy_bytes=256 * MIB,
    copy_seconds=1.0,
    disk_bytes=GIB,
    disk_seconds=4.0,
    total=55.0,
)
QUICK = Pace(
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

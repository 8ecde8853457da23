"""Algorithm and bus bandwidth of collective operations.

As defined in https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md: bus bandwidth
does not depend on the number of processes and compares with what a link can carry.
"""

from __future__ import annotations

from pipeline.doctor.report import Collective


def allreduce(size: int, seconds: float, procs: int) -> Collective:
    """Every byte crosses a link 2 (n - 1) / n times: reduced on one, then told to all."""
    return _collective(size, seconds, 2 * (procs - 1) / procs)


def allgather(size: int, seconds: float, procs: int) -> Collective:
    """All but a process's own share comes to it: (n - 1) / n of the whole, `size` bytes."""
    return _collective(size, seconds, (procs - 1) / procs)


def _collective(size: int, seconds: float, crossings: float) -> Collective:
    rate = size / seconds
    return Collective(bytes=size, seconds=seconds, algbw=rate, busbw=rate * crossings)

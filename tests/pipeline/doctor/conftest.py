"""A machine without any finding; tests change it."""

from __future__ import annotations

import pytest

from pipeline.doctor.measurements import bandwidth
from pipeline.doctor.report import (
    Folder,
    Host,
    Kernel,
    Limit,
    MachineReport,
    Matmul,
    Operators,
    Software,
)

GB = 10**9


@pytest.fixture
def healthy() -> MachineReport:
    limits = {
        "open_files": Limit(soft=65536, hard=65536),
        "locked_memory": Limit(soft=None, hard=None),
        "processes": Limit(soft=65536, hard=65536),
    }
    return MachineReport(
        devices=(),
        procs=2,
        host_memory_bytes=64 * GB,
        matmul_flops=Matmul(fp32=1e11, bf16=1e12),
        allreduce=(bandwidth("allreduce", 1 << 20, 1e-3, 2),),
        allgather=(bandwidth("allgather", 1 << 20, 1e-3, 2),),
        host_copy_bytes_per_s=5e9,
        h2d_bytes_per_s=None,
        d2h_bytes_per_s=None,
        disk_write_bytes_per_s=1e9,
        disk_read_bytes_per_s=1e9,
        host=Host(cores=8, memory_free_bytes=60 * GB),
        kernel=Kernel(
            limits=limits,
            locks_freely=False,
            shared_memory_bytes=32 * GB,
            shared_memory_free_bytes=32 * GB,
        ),
        software=Software(python="3.11.7", packages={"torch": "2.13.0+cpu"}, gpus=0),
        operators=Operators(compiler="/usr/bin/c++", ninja="/usr/bin/ninja", libaio=True),
        folders=(
            Folder(use="runs", path="/data", filesystem="xfs", free_bytes=900 * GB, writable=True),
        ),
    )

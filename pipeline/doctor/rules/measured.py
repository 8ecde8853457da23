"""What the measurements say."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.doctor.gpu_topology import is_nvlink
from pipeline.doctor.report import Failure, MachineReport
from pipeline.doctor.rules.finding import Finding
from pipeline.utils.text import human

LARGE = 64 << 20
"""Bytes: smaller exchanges take their time for other things than the links."""
NVLINK_BUSBW = 20e9
"""Bytes per second: what one link of the first NVLink carries in a direction, and more than PCIe
3.0 does."""

WEIGHTS = 7e9
BYTES_PER_WEIGHT = 12
"""Of a checkpoint: the weight and AdamW's two moments in fp32."""
SLOW_DISK = 200e6
"""Bytes per second."""

FATAL = {
    "torch": "no run can start",
    "collectives": "no run of several processes can train",
    "matmul": "no run can train",
}


def failed(machine: MachineReport) -> Iterator[Finding]:
    """A measurement that gave no result."""
    for failure in machine.failures:
        if _is_slow_import(failure):
            continue
        fatal = None if failure.late else FATAL.get(failure.measurement)
        nccl = failure.measurement == "collectives" and machine.device == "cuda"
        log = "NCCL_DEBUG=INFO " if nccl else ""
        yield Finding(
            severity="error" if fatal else "warning",
            name="failed",
            seen=f"{failure.measurement}: {failure.reason}",
            why=fatal or "what it measures is slow, hangs or is missing",
            do=f"{log}pipe doctor --json, when the machine is idle: `failures` has what the "
            "process printed",
        )


def slow_import(machine: MachineReport) -> Iterator[Finding]:
    """What takes long is no fault of the driver's, and of GPUs nothing is known then."""
    for failure in filter(_is_slow_import, machine.failures):
        gpus = "; GPUs were not looked at, and what was measured is the processor"
        yield Finding(
            severity="warning",
            name="slow-import",
            seen=f"importing torch was {failure.reason}",
            why="every process of a run does it first" + (gpus if machine.software.gpus else ""),
            do="run pipe doctor again, as files that were read are in memory now; if it stays so, "
            "move the Python environment to a faster, local disk, and see whether nvidia-smi hangs",
        )


def _is_slow_import(failure: Failure) -> bool:
    return failure.measurement == "torch" and failure.late


def nvlink_unused(machine: MachineReport) -> Iterator[Finding]:
    """All pairs have NVLink, but the exchange is as slow as over PCIe."""
    links = machine.topology.links
    large = [each.busbw for each in machine.allreduce if each.bytes >= LARGE]
    if not links or not all(map(is_nvlink, links)) or not large or machine.device != "cuda":
        return
    if max(large) < NVLINK_BUSBW:
        yield Finding(
            severity="warning",
            name="nvlink-unused",
            seen=f"all-reduce has a bus bandwidth of {human(max(large))}/s, though NVLink connects "
            "all GPUs",
            why="NCCL goes another way: every step waits for its exchange",
            do="NCCL_DEBUG=INFO tells which way; look for NCCL_P2P_DISABLE, NCCL_P2P_LEVEL and a "
            "virtual machine that hides NVLink; nvidia-smi nvlink -s tells the links' state",
        )


def slow_disk(machine: MachineReport) -> Iterator[Finding]:
    """In the time of a checkpoint of a usual model."""
    rate = machine.disk_write_bytes_per_s
    if rate is None or rate >= SLOW_DISK:
        return
    size = WEIGHTS * BYTES_PER_WEIGHT
    yield Finding(
        severity="warning",
        name="slow-disk",
        seen=f"{human(rate)}/s are written",
        why=f"the checkpoint of a 7B model with its AdamW, {human(size)}, takes "
        f"{size / rate / 60:.0f} min",
        do="use a faster disk (--runs FOLDER), or save less often (checkpoint's `every`)",
    )


RULES = (failed, slow_import, nvlink_unused, slow_disk)

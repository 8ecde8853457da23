"""Rules that find in a machine report what makes training fail or slow.

A rule finds nothing in what is unknown. findings.toml has the severity and the advice by name.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from pipeline.doctor.report import SEVERITIES, Finding, Limit, Link, MachineReport
from pipeline.utils.text import human, plural

BF16 = 8.0  # first compute capability with bf16 arithmetic
MOSTLY_FREE = 0.9  # share of a GPU's memory; CUDA itself and a desktop take some
LARGE = 64 << 20
"""Bytes; smaller exchanges do not measure the links."""
NVLINK_BUSBW = 20e9
"""Bytes per second: one link of the first NVLink in a direction, more than PCIe 3.0 reaches."""
FATAL = {"torch", "matmul", "collectives"}  # fail only if no run can train
CHECKPOINT = 7e9 * 12  # bytes of a 7B model's weights and AdamW's two moments in fp32
SLOW_DISK = 200e6  # bytes per second
SHARED = LOCKED = 1 << 30  # bytes; NVIDIA recommends --shm-size=1g for containers
BUSY = 0.5  # processes for each core
LOW = 0.1  # share of host memory
FEW = 4096  # open files, or processes and threads
HARMLESS = {"", "0", "OFF", "INFO"}
NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "virtiofs", "afs"}
"""Network file systems, but for parallel ones (Lustre, GPFS, BeeGFS, WekaFS)."""
MEMORY = {"tmpfs", "ramfs"}
LITTLE_SPACE = 10e9
UNLIMITED = Limit(soft=None, hard=None)
Findings = Iterator[tuple[str, str] | tuple[str, str, Mapping[str, str]]]
"""A name and what is seen, then what replaces parts of the advice."""


def findings(machine: MachineReport) -> list[Finding]:
    """All findings, the worst first."""
    found = [
        Finding.model_validate({**advice()[name], "name": name, "seen": seen, **dict(*other)})
        for rule in RULES
        for name, seen, *other in rule(machine)
    ]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


@functools.cache
def advice() -> dict[str, dict[str, Any]]:
    """Severity, reason and remedy of each finding, by name."""
    return tomllib.loads(Path(__file__).with_name("findings.toml").read_text("utf-8"))


def _below(value: float | None, bound: float) -> TypeGuard[float]:
    return value is not None and value < bound


def _torch(machine: MachineReport) -> Findings:
    """torch is missing or cannot be imported, or the driver has GPUs that torch cannot use: a torch
    without CUDA, or a driver too old."""
    software, usable = machine.software, len(machine.devices)
    problem = software.torch_problem or ""
    if software.python is not None and "torch" not in software.packages:
        yield "torch", "torch is not installed"
    elif problem.startswith("torch cannot be imported"):
        yield "torch", problem
    if software.torch_cuda and software.gpus == 0 and not machine.devices:
        built = f"torch is built for CUDA {software.torch_cuda}"
        yield "no-driver", f"{built}, but there is no GPU with a driver"
    gpus, cuda = software.gpus or 0, software.torch_cuda
    unknown = any(failure.measurement == "torch" for failure in machine.failures)
    if unknown or usable >= gpus or "torch" not in software.packages:
        return
    if usable:
        seen = f"can use {usable} only"
    elif cuda is None and software.torch_problem is None:
        seen = "was built without CUDA"
    else:
        driver = f"driver {software.driver}" if software.driver else "the driver"
        reason = software.torch_problem or "torch does not say why"
        seen = f"{f'for CUDA {cuda} ' if cuda else ''}cannot use them under {driver}: {reason}"
    torch = f"torch {software.packages['torch']}"
    yield "driver", f"{plural(gpus, 'GPU')}, but {torch} {seen}"


def _companions(machine: MachineReport) -> Findings:
    """torchvision or torchaudio was built for another torch. A requirement without a build (2.8.0)
    is met by any (2.8.0+cu128)."""
    packages = machine.software.packages
    torch = packages.get("torch", "")
    version, _, build = torch.partition("+")
    for name, needed in machine.software.needs_torch.items():
        own = packages.get(name, "")
        fits = needed in (torch, version) and own.partition("+")[2] in ("", build)
        if torch and not fits:
            built = f"{name} {own} was built for torch {needed}"
            yield "torchvision", f"{built}, but torch is {torch}"


def _compilers(machine: MachineReport) -> Findings:
    tools = machine.operators
    if tools is None:
        return
    names = {"C++ compiler": tools.compiler, "ninja": tools.ninja}
    if missing := [name for name, path in names.items() if path is None]:
        yield "compiler", f"no {' and no '.join(missing)}"
    if machine.devices and tools.cuda_home is None:
        yield "cuda-home", "no CUDA toolkit (nvcc) was found"
    if not tools.libaio:
        yield "libaio", "no libaio with its header"


def _gpus(machine: MachineReport) -> Findings:
    old = [each for each in machine.devices if float(each.compute_capability or "inf") < BF16]
    for device in old[:1]:
        capability = f"compute capability {device.compute_capability}"
        yield "bf16", f"{device.name} has {capability}, below {BF16}"
    kinds = sorted({device.name for device in machine.devices})
    if len(kinds) > 1:
        yield "unlike-gpus", f"GPUs of different kinds: {', '.join(kinds)}"
    for name, device in machine.gpus.items():
        free, size = device.memory_free_bytes, device.memory_bytes
        if _below(free, MOSTLY_FREE * size):
            yield "gpu-in-use", f"{name} has {human(free)} of {human(size)} free"


def _links(machine: MachineReport) -> Findings:
    def pairs(links: Sequence[Link]) -> str:
        named = ", ".join(f"{link.a}-{link.b}" for link in links[:4])
        return f"{named} and {len(links) - 4} more pairs" if len(links) > 4 else named

    links = machine.topology.links
    if across := [link for link in links if link.kind == "SYS"]:
        yield "across-numa", f"{pairs(across)}: only over the link between processors (SYS)"
    if slow := [link for link in links if not link.is_nvlink and link.kind != "SYS"]:
        kinds = ", ".join(sorted({link.kind for link in slow}))
        yield "no-nvlink", f"{pairs(slow)}: no NVLink, only PCIe ({kinds})"
    fastest = max((one.busbw for one in machine.allreduce if one.bytes >= LARGE), default=None)
    connected = machine.device == "cuda" and links and all(link.is_nvlink for link in links)
    if connected and _below(fastest, NVLINK_BUSBW):
        rate = f"a bus bandwidth of {human(fastest)}/s"
        yield "nvlink-unused", f"all-reduce has {rate}, though NVLink connects all GPUs"


def _measured(machine: MachineReport) -> Findings:
    busy = machine.load is not None and machine.load >= BUSY
    if busy:
        yield "busy", f"{machine.load:.1f} processes for each core ran or waited before"
    for failure in machine.failures:
        if failure.measurement == "torch" and failure.late and not busy:
            yield "slow-import", f"importing torch was {failure.reason}"
        else:
            fatal = failure.measurement in FATAL and not failure.late
            other = {"severity": "error"} if fatal else {}
            yield "failed", f"{failure.measurement}: {failure.reason}", other
    rate = machine.disk_write_bytes_per_s
    if _below(rate, SLOW_DISK) and not busy:
        minutes = f"{CHECKPOINT / rate / 60:.0f} min"
        model = f"a 7B model with its AdamW, {human(CHECKPOINT)}"
        why = f"the checkpoint of {model}, takes {minutes}"
        yield "slow-disk", f"{human(rate)}/s are written", {"why": why}


def _memory(machine: MachineReport) -> Findings:
    kernel, procs = machine.kernel, machine.procs
    free, size = kernel.shared_memory_free_bytes, kernel.shared_memory_bytes
    if procs > 1 and _below(free, SHARED) and size is not None:
        room = f"{human(free)} of {human(size)} free"
        yield "shared-memory", f"/dev/shm has {room}, for {procs} processes"
    limit = kernel.limits.get("locked_memory", UNLIMITED).soft
    if kernel.locks_freely is False and _below(limit, LOCKED):
        yield "locked-memory", f"{human(limit)} of memory may be locked (ulimit -l)"
    free, total = machine.host.memory_free_bytes, machine.host_memory_bytes
    if total is not None and _below(free, LOW * total):
        yield "host-memory", f"{human(free)} of {human(total)} of host memory are free"


def _processes(machine: MachineReport) -> Findings:
    cores, procs = machine.host.cores, machine.procs
    if _below(cores, procs):
        yield "cores", f"{procs} processes share {cores:g} cores"
    threads = machine.environment.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > 1 and _below(cores, int(threads) * procs):
        yield "threads", f"OMP_NUM_THREADS={threads} in {procs} processes on {cores:g} cores"
    limits = (machine.kernel.limits.get(name, UNLIMITED) for name in ("open_files", "processes"))
    files, processes = (limit.soft for limit in limits)
    group = machine.kernel.processes_in_group
    if _below(files, FEW):
        yield "open-files", f"a process may open {files} files (ulimit -n)"
    for limit, source in (processes, "ulimit -u"), (group, "pids.max of the control group"):
        if _below(limit, FEW):
            yield "processes", f"{limit} processes and threads are allowed ({source})"


def _switches(machine: MachineReport) -> Findings:
    """Variables that were set to find a fault, and forgotten."""
    for name, effect in advice()["slow-switch"]["variables"].items():
        value = machine.environment.get(name, "")
        unused = name == "NCCL_IB_DISABLE" and not machine.network.rdma
        if value.upper() not in HARMLESS and not unused:
            yield "slow-switch", f"{name}={value}", {"why": effect}


def _folders(machine: MachineReport) -> Findings:
    for folder in machine.folders:
        path, kind, free = folder.path, folder.filesystem, folder.free_bytes
        if not folder.writable:
            yield "not-writable", f"{path}, for {folder.use}, cannot be written to"
        if kind in NETWORK:
            yield "network-folder", f"{path}, for {folder.use}, is on {kind}"
        if folder.use == "runs" and _below(free, LITTLE_SPACE):
            yield "disk-space", f"{path} has {human(free)} free"
        if folder.use == "runs" and kind in MEMORY:
            yield "folder-in-memory", f"{path} is on {kind}"


RULES: tuple[Callable[[MachineReport], Findings], ...] = (
    _torch, _companions, _compilers, _gpus, _links, _measured, _memory,
    _processes, _switches, _folders,
)  # fmt: skip

"""Read the host, its network, folders, limits and environment, versions of packages, and the tools
that compile operators. Imports no torch."""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import psutil

from pipeline.doctor.report import (
    Folder,
    Host,
    Interface,
    Kernel,
    Limit,
    Network,
    Operators,
    Software,
)
from pipeline.hardware.gpus import gpu_count
from pipeline.hardware.host import free_memory, most_processes, usable_cores
from pipeline.utils.packages import versions

MEGABIT = 1e6
LIMITS = {
    "open_files": resource.RLIMIT_NOFILE,
    "locked_memory": resource.RLIMIT_MEMLOCK,
    "processes": resource.RLIMIT_NPROC,
}
MODEL = r"^model name\s*:\s*(.*\S)"
CAPABILITIES = r"^CapEff:\s*([0-9a-f]+)$"
CAP_IPC_LOCK = 1 << 14
PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")
VARIABLES = {
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_HOME", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING", "TORCH_DISTRIBUTED_DEBUG", "MASTER_ADDR",
}  # fmt: skip
"""Variables that change how a run goes, in addition to names that begin with PREFIXES."""
PACKAGES = (
    "pipetrain", "torch", "torchvision", "torchaudio", "triton", "transformers", "deepspeed",
    "accelerate", "safetensors", "numpy", "peft", "bitsandbytes", "torchao", "flash_attn",
    "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
COMPANIONS = ("torchvision", "torchaudio")
"""Packages whose compiled code fits one torch only."""


def host() -> Host:
    """Processor, cores and memory, as far as affinity and control groups leave them."""
    return Host(
        system=platform.platform(),
        processor=_search(MODEL, "/proc/cpuinfo") or platform.machine() or None,
        cores=usable_cores(),
        memory_free_bytes=free_memory(),
    )


def network() -> Network:
    """Interfaces that are up, and RDMA devices; a speed that the driver does not report is None."""
    interfaces = tuple(
        Interface(name=name, bits_per_s=state.speed * MEGABIT or None)
        for name, state in sorted(psutil.net_if_stats().items())
        if state.isup and "loopback" not in state.flags.split(",")
    )
    rdma = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    return Network(interfaces=interfaces, rdma=tuple(rdma))


def folders(runs: Path) -> tuple[Folder, ...]:
    try:
        temporary = tempfile.gettempdir()
    except OSError:  # there is none that Python can write to
        temporary = os.environ.get("TMPDIR") or "/tmp"
    return _folder("runs", runs.resolve()), _folder("temporary files", Path(temporary).resolve())


def _folder(use: Literal["runs", "temporary files"], path: Path) -> Folder:
    writable = False
    # permissions do not show that a file system is full
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=path) as file:
        file.write(b"something")
        file.flush()
        writable = True
    kind, free = filesystem(path), _space(path)[1]
    return Folder(use=use, path=str(path), filesystem=kind, free_bytes=free, writable=writable)


def _space(path: Path) -> tuple[int | None, int | None]:
    """All and free bytes of the file system; None if it cannot be asked."""
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(path)
        return usage.total, usage.free
    return None, None


def filesystem(path: Path) -> str | None:
    """Kind of the file system that holds the absolute `path`: the deepest mount above it decides,
    and the last one mounted there hides others."""
    above = {str(parent) for parent in (path, *path.parents)}
    mounts = [mount for mount in psutil.disk_partitions(all=True) if mount.mountpoint in above]
    # of equally deep ones, max returns the first
    deepest = max(reversed(mounts), key=lambda mount: len(mount.mountpoint), default=None)
    return (deepest and deepest.fstype) or None


def kernel() -> Kernel:
    """Limits and settings; None if the system does not report one."""
    total, free = _space(Path("/dev/shm"))
    capabilities = _search(CAPABILITIES, "/proc/self/status")
    limits = {}
    for name, number in LIMITS.items():
        known = (None if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(number))
        limits[name] = Limit(**dict(zip(("soft", "hard"), known, strict=True)))
    return Kernel(
        limits=limits,
        processes_in_group=most_processes(),
        locks_freely=bool(int(capabilities, 16) & CAP_IPC_LOCK) if capabilities else None,
        shared_memory_bytes=total,
        shared_memory_free_bytes=free,
    )


def _search(pattern: str, file: str | Path) -> str | None:
    """The pattern's group in the file's first line that has it; None without one."""
    found = None
    with contextlib.suppress(OSError):
        found = re.search(pattern, Path(file).read_text("utf-8"), re.MULTILINE)
    return found[1] if found else None


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that change how a run goes, and no others, which may hold secrets."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if name in VARIABLES or name.startswith(PREFIXES)
    }


def software(torch: Mapping[str, Any]) -> Software:
    """Versions; `torch` has what `measure_torch` has found, or nothing."""
    return Software(
        python=platform.python_version(),
        packages=versions(PACKAGES),
        needs_torch=needs_torch(),
        torch_cuda=torch.get("cuda"),
        torch_problem=torch.get("problem"),
        nccl=torch.get("nccl"),
        driver=torch.get("driver"),
        gpus=gpu_count(),
    )


def needs_torch() -> dict[str, str]:
    """The torch that each companion requires, by companion."""
    found = {}
    for name in COMPANIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            for requirement in importlib.metadata.requires(name) or ():
                if exact := re.match(r"torch\s*\(?==\s*([\w.+]+)", requirement):
                    found[name] = exact[1]
    return found


def operators() -> Operators:
    """The tools that compile DeepSpeed's operators, found as torch and DeepSpeed find them."""
    chosen = os.environ.get("CXX", "c++").split()
    scripts = sysconfig.get_path("scripts")  # pip's is called there, whatever is first on PATH
    includes = ["/usr/include", "/usr/local/include", *os.environ.get("CPATH", "").split(":")]
    header = any(Path(folder, "libaio.h").exists() for folder in filter(None, includes))
    home, nvcc = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"), shutil.which("nvcc")
    found = nvcc and str(Path(nvcc).parent.parent)
    if home or not nvcc:
        home = home or "/usr/local/cuda"
        found = home if Path(home, "bin/nvcc").exists() else None
    return Operators(
        compiler=shutil.which(chosen[0]) if chosen else None,
        ninja=shutil.which("ninja", path=scripts) or shutil.which("ninja"),
        cuda_home=found,
        libaio=header and ctypes.util.find_library("aio") is not None,
    )

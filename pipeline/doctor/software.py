"""Versions, and what compiles operators; nothing heavy is imported."""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.doctor.gpu_topology import among, parse_topology
from pipeline.doctor.report import Operators, Software, Topology
from pipeline.hardware.gpus import gpu_count

PACKAGES = (
    "pipetrain", "torch", "torchvision", "torchaudio", "triton", "transformers", "deepspeed",
    "accelerate", "safetensors", "numpy", "peft", "bitsandbytes", "torchao", "flash_attn",
    "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
COMPANIONS = ("torchvision", "torchaudio")
"""Packages whose compiled code fits one torch only."""
ANSWER_SECONDS = 10
"""nvidia-smi takes seconds where no process keeps the driver awake."""


def software(torch: Mapping[str, Any]) -> Software:
    """Versions; `torch` is what torch_facts.py told, empty if nothing."""
    return Software(
        python=platform.python_version(),
        packages=versions(PACKAGES),
        needs_torch=needs_torch(),
        torch_cuda=torch.get("cuda"),
        torch_problem=torch.get("problem"),
        nccl=torch.get("nccl"),
        driver=driver(),
        gpus=gpu_count(),
    )


def versions(names: Iterable[str]) -> dict[str, str]:
    """Those of `names` that are installed."""
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def needs_torch() -> dict[str, str]:
    """The torch that each companion says it was built for."""
    found = {}
    for name in COMPANIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            for requirement in importlib.metadata.requires(name) or ():
                if exact := re.match(r"torch\s*\(?==\s*([\w.+]+)", requirement):
                    found[name] = exact[1]
    return found


def driver() -> str | None:
    """The version of NVIDIA's kernel driver."""
    said = _ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return said.splitlines()[0].strip() if said else None


def gpu_uuids() -> dict[int, str]:
    """By nvidia-smi's number; empty without it."""
    said = _ask("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader") or ""
    rows = re.findall(r"^(\d+), *(\S+)$", said, re.MULTILINE)
    return {int(number): uuid for number, uuid in rows}


def topology(numbers: Collection[int]) -> Topology:
    """How the GPUs of these numbers reach each other; empty without nvidia-smi."""
    return among(parse_topology(_ask("nvidia-smi", "topo", "-m") or ""), numbers)


def operators() -> Operators:
    """What DeepSpeed's operators are compiled with, found as torch and DeepSpeed look for it."""
    chosen = os.environ.get("CXX", "c++").split()
    scripts = sysconfig.get_path("scripts")
    return Operators(
        known=True,
        compiler=shutil.which(chosen[0]) if chosen else None,
        ninja=shutil.which("ninja") or shutil.which("ninja", path=scripts),
        cuda_home=_cuda_home(),
        libaio=_has_libaio(),
    )


def _cuda_home() -> str | None:
    given = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if given:
        return given if (Path(given) / "bin/nvcc").exists() else None
    nvcc = shutil.which("nvcc")
    if nvcc:
        return str(Path(nvcc).parent.parent)
    return "/usr/local/cuda" if Path("/usr/local/cuda/bin/nvcc").exists() else None


def _has_libaio() -> bool:
    """The library and its header."""
    folders = [Path("/usr/include"), Path("/usr/local/include")]
    folders += [Path(each) for each in os.environ.get("CPATH", "").split(os.pathsep) if each]
    header = any((folder / "libaio.h").exists() for folder in folders)
    return header and ctypes.util.find_library("aio") is not None


def _ask(*command: str) -> str | None:
    """What a command prints; None if it is not there, fails, or does not answer."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def measure(settings: Mapping[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
    """Tell one record; its `problem` is why there is no more to tell."""
    try:
        import torch
    except Exception as error:  # a broken installation raises whatever it likes
        tell({"problem": f"torch cannot be imported: {error}", "devices": []})
        return
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        devices = list(_devices()) if torch.cuda.is_available() else []
    problem = None if devices or not said else str(said[0].message).split("\n")[0]
    tell({"cuda": torch.version.cuda, "nccl": _nccl(), "problem": problem, "devices": devices})


def _devices() -> Iterator[dict[str, Any]]:
    import torch

    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield {
            "name": properties.name,
            "uuid": f"GPU-{properties.uuid}",
            "memory_bytes": properties.total_memory,
            "memory_free_bytes": torch.cuda.mem_get_info(index)[0],
            "compute_capability": f"{properties.major}.{properties.minor}",
        }


def _nccl() -> str | None:
    """The NCCL that torch was built with."""
    import torch
    import torch.distributed as dist

    if torch.version.cuda is None or not dist.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]

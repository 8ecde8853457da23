"""Read versions, and find the tools that compile operators; only `torch_facts` imports torch."""

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
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.doctor.gpu_topology import among, parse_topology
from pipeline.doctor.report import Operators, Software, Topology
from pipeline.doctor.timing import Record
from pipeline.hardware.gpus import gpu_count
from pipeline.run.rundir import versions

PACKAGES = (
    "pipetrain", "torch", "torchvision", "torchaudio", "triton", "transformers", "deepspeed",
    "accelerate", "safetensors", "numpy", "peft", "bitsandbytes", "torchao", "flash_attn",
    "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
COMPANIONS = ("torchvision", "torchaudio")
"""Packages whose compiled code fits one torch only."""
ANSWER_SECONDS = 10
"""Time limit of nvidia-smi, which takes seconds if no process keeps the driver awake."""


def software(torch: Mapping[str, Any]) -> Software:
    """Versions; `torch` is the record of `torch_facts`, or empty."""
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


def needs_torch() -> dict[str, str]:
    """The torch that each companion requires, by companion."""
    found = {}
    for name in COMPANIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            for requirement in importlib.metadata.requires(name) or ():
                if exact := re.match(r"torch\s*\(?==\s*([\w.+]+)", requirement):
                    found[name] = exact[1]
    return found


def driver() -> str | None:
    """The version of NVIDIA's kernel driver."""
    answer = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return answer.splitlines()[0].strip() if answer else None


def gpu_uuids() -> dict[int, str]:
    """UUIDs of the GPUs by nvidia-smi's number; empty without it."""
    answer = _output("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")
    rows = re.findall(r"^(\d+), *(\S+)$", answer, re.MULTILINE)
    return {int(number): uuid for number, uuid in rows}


def topology(numbers: Collection[int]) -> Topology:
    """Links between the GPUs with these numbers; empty without nvidia-smi."""
    return among(parse_topology(_output("nvidia-smi", "topo", "-m")), numbers)


def _output(*command: str) -> str:
    """Output of a command; empty if it is missing, fails, or does not answer in time."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def operators() -> Operators:
    """The tools that compile DeepSpeed's operators, found as torch and DeepSpeed find them."""
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
    nvcc = shutil.which("nvcc")
    if nvcc and not given:
        return str(Path(nvcc).parent.parent)
    home = given or "/usr/local/cuda"
    return home if (Path(home) / "bin/nvcc").exists() else None


def _has_libaio() -> bool:
    """Whether both the library and its header are installed."""
    folders = [Path("/usr/include"), Path("/usr/local/include")]
    folders += [Path(each) for each in os.environ.get("CPATH", "").split(os.pathsep) if each]
    header = any((folder / "libaio.h").exists() for folder in folders)
    return header and ctypes.util.find_library("aio") is not None


def torch_facts(settings: Mapping[str, Any], record: Record) -> None:
    """Record torch's CUDA, NCCL and devices; `problem` is why it cannot be imported or use them."""
    try:
        import torch
    except Exception as error:  # a broken installation may raise anything
        record({"problem": f"torch cannot be imported: {error}", "devices": []})
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        devices = list(_devices()) if torch.cuda.is_available() else []
    problem = None if devices or not caught else str(caught[0].message).split("\n")[0]
    record({"cuda": torch.version.cuda, "nccl": _nccl(), "problem": problem, "devices": devices})


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
    """The version of the NCCL that torch was built with."""
    import torch
    import torch.distributed as dist

    if torch.version.cuda is None or not dist.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]

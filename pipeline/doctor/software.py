"""Read versions, and find the tools that compile operators; nothing here imports torch."""

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
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pipeline.doctor.report import Link, Operators, Software, Topology
from pipeline.hardware.gpus import gpu_count
from pipeline.utils.versions import versions

PACKAGES = (
    "pipetrain", "torch", "torchvision", "torchaudio", "triton", "transformers", "deepspeed",
    "accelerate", "safetensors", "numpy", "peft", "bitsandbytes", "torchao", "flash_attn",
    "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU\d+")
COMPANIONS = ("torchvision", "torchaudio")
"""Packages whose compiled code fits one torch only."""
ANSWER_SECONDS = 10
"""Time limit of nvidia-smi, which takes seconds if no process keeps the driver awake."""


def software(torch: Mapping[str, Any]) -> Software:
    """Versions; `torch` holds the facts that torch reports, or nothing."""
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
    return parse_topology(_output("nvidia-smi", "topo", "-m"), numbers)


def parse_topology(text: str, numbers: Collection[int]) -> Topology:
    """Links between the GPUs with these numbers, each pair once, and the GPUs' NUMA nodes.

    `text` is a table whose cells are separated by tabs, or by blanks if it was pasted:

        GPU0  GPU1  NIC0  CPU Affinity  NUMA Affinity  GPU NUMA ID
        GPU0   X    NV18  PIX           0-47           0              N/A

    Newer drivers underline the header with terminal codes.
    """
    gpus = {f"GPU{number}" for number in numbers}
    lines = [line.split() for line in _TERMINAL_CODES.sub("", text).splitlines()]
    table = [cells for cells in lines if cells and _GPU.fullmatch(cells[0])]
    if not table or "X" in table[0]:  # no header
        return Topology()
    columns = table[0][: table[0].index("CPU")] if "CPU" in table[0] else table[0]
    links, numa = [], {}
    for own, *cells in table[1:]:
        kinds, rest = cells[: len(columns)], cells[len(columns) :]
        for other, kind in zip(columns, kinds, strict=False):
            if {own, other} <= gpus and columns.index(own) < columns.index(other):
                links.append(Link(a=own, b=other, kind=kind))
        if own in gpus and len(rest) > 1 and rest[1] != "N/A":
            numa[own] = rest[1]
    return Topology(links=tuple(links), numa=numa)


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
    scripts = sysconfig.get_path("scripts")  # pip's is called there, whatever comes first on PATH
    folders = [Path("/usr/include"), Path("/usr/local/include")]
    folders += [Path(each) for each in os.environ.get("CPATH", "").split(os.pathsep) if each]
    header = any((folder / "libaio.h").exists() for folder in folders)
    return Operators(
        compiler=shutil.which(chosen[0]) if chosen else None,
        ninja=shutil.which("ninja", path=scripts) or shutil.which("ninja"),
        cuda_home=_cuda_home(),
        libaio=header and ctypes.util.find_library("aio") is not None,
    )


def _cuda_home() -> str | None:
    given = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc")
    if nvcc and not given:
        return str(Path(nvcc).parent.parent)
    home = given or "/usr/local/cuda"
    return home if (Path(home) / "bin/nvcc").exists() else None

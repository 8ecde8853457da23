"""Accelerators by name: memory, arithmetic and links, by the vendors' data sheets."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


def gpu_count(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> int:
    """GPUs that a process here would see: the driver's, or CUDA_VISIBLE_DEVICES' choice of them."""
    present = len(_entries(root / "proc/driver/nvidia/gpus", "*"))
    present = present or len(_entries(root / "dev", "nvidia[0-9]*"))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    chosen = 0
    for device in visible.split(","):
        # CUDA ignores everything from the first entry that names no device
        if not device.strip() or device.strip().startswith("-"):
            break
        chosen += 1
    return min(present, chosen)


def _entries(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern)) if folder.is_dir() else []


GIB = 1 << 30
GB = 10**9


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device. Rates are the most that is possible."""

    name: str
    """Part of the device's own name."""
    memory: int
    """Bytes that programs can take, as the driver reports."""
    flops: float
    """Dense 16-bit floating-point operations a second with 32-bit accumulation."""
    flops_fp32: float
    """The same in 32 bits, without TF32."""
    bandwidth: float
    """Bytes a second between it and its own memory."""
    peers: float
    """Bytes a second that it sends to the other devices of its node, in one direction."""
    host: float
    """Bytes a second to or from its machine's memory, in one direction."""
    bf16: bool
    """Whether it has units for bf16."""
    matmul: float
    """Share of `flops` that large products of matrices reach."""

    @property
    def on_pcie(self) -> bool:
        """Whether PCIe is how it reaches others too: a card, not a module in a socket."""
        return self.peers == self.host

    def rate(self, compute: str) -> float:
        """The most operations a second in `fp32`, `bf16` or `fp16`. Without units for bf16 it is
        emulated in fp32, whose rate it stays below."""
        wide = compute == "fp32" or (compute == "bf16" and not self.bf16)
        return self.flops_fp32 if wide else self.flops


@functools.cache
def accelerators() -> tuple[Accelerator, ...]:
    """All that are known, the more particular name first, as `gpus.json` has them: GiB,
    dense TFLOP/s, GB/s.

    Arithmetic, memory and links are those of the vendors' data sheets and architecture white
    papers; of GeForce cards, products with 32-bit accumulation, which run at half the rate of those
    with 16 bits. Memory is a little less than what is printed on the box: the driver takes some.
    Of the MI250X it is one of the two dies, each a device of its own. `matmul` is the share of the
    arithmetic that large products in bf16 reached in the table "Maximum Achievable Matmul FLOPS" of
    S. Bekman, Machine Learning Engineering (github.com/stas00/ml-engineering, 2025): 80 % on an
    H100, which the others are taken to reach.
    """
    path = Path(__file__).with_suffix(".json")
    return tuple(_device(name, **fields) for name, fields in json.loads(path.read_bytes()).items())


def _device(
    name: str,
    *,
    memory: float,
    flops: float,
    fp32: float,
    bandwidth: float,
    peers: float,
    host: float,
    bf16: bool = True,
    matmul: float = 0.8,
) -> Accelerator:
    return Accelerator(
        name=name,
        memory=round(memory * GIB),
        flops=flops * 1e12,
        flops_fp32=fp32 * 1e12,
        bandwidth=bandwidth * GB,
        peers=peers * GB,
        host=host * GB,
        bf16=bf16,
        matmul=matmul,
    )


COMMON = {
    "nvidia", "geforce", "tesla", "amd", "instinct", "gpu", "tensor", "core", "generation", "rtx",
    "workstation", "edition", "ac", "hbm2", "hbm2e", "hbm3", "hbm3e",
}  # fmt: skip
"""Words for makers, series and kinds of memory, which do not distinguish devices."""
SOCKETS = {"sxm", "sxm2", "sxm3", "sxm4", "sxm5", "sxm6", "oam"}
PRINTED = 0.9
"""At least this share of the memory that is printed on the box can be taken."""


def find_accelerator(name: str) -> Accelerator | None:
    """The first device whose name's words are all in `name`, if the rest of `name` does not
    contradict it. None for an unknown device, such as a laptop's, a part of a GPU, or one with
    another memory size."""
    words = _words(name)
    return next((device for device in accelerators() if _is(device, words)), None)


def _is(device: Accelerator, words: set[str]) -> bool:
    own = _words(device.name)
    return own <= words and all(_suits(device, word) for word in words - own)


def _suits(device: Accelerator, word: str) -> bool:
    """Whether a word that is not in its name says what the device has."""
    if word == "pcie" or word in SOCKETS:
        return device.on_pcie == (word == "pcie")
    size = re.fullmatch(r"([0-9]+)gb", word)
    return size is not None and PRINTED * int(size[1]) <= device.memory / GIB <= int(size[1])


def _words(name: str) -> set[str]:
    """Words that distinguish devices: `h100`, `sxm5`, `80gb` for `NVIDIA H100SXM5 80G`."""
    apart = re.sub(r"\brtx(?=[0-9a])", "rtx ", name.lower())
    apart = re.sub(r"(?<=[0-9])(?=(?:sxm|pcie|nvl))", " ", apart)
    joined = re.sub(r"\b([0-9]+)\s*(?:g|gb|gib)\b", r"\1gb", apart)
    return set(re.split(r"[-_\s]+", joined.strip())) - COMMON


NETWORKS: Mapping[str, float] = {
    "10gbe": 1.25 * GB,
    "25gbe": 3.125 * GB,
    "100gbe": 12.5 * GB,
    "200g": 25 * GB,
    "400g": 50 * GB,
    "800g": 100 * GB,
}
"""Name of a link -> bytes a second in one direction."""

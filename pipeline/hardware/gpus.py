"""Accelerators by name: memory, arithmetic and links, by the vendors' data sheets."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


def gpu_count(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> int:
    """GPUs that a process here would see: the driver's, or CUDA_VISIBLE_DEVICES' choice of them."""
    places = (("proc/driver/nvidia/gpus", "*"), ("dev", "nvidia[0-9]*"))
    counts = (len([*(root / folder).glob(names)]) for folder, names in places)
    present = next(filter(None, counts), 0)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    # CUDA ignores everything from the first entry that names no device
    named = (bool(name.strip()) and name.strip()[0] != "-" for name in visible.split(","))
    return min(present, len([*itertools.takewhile(bool, named)]))


GIB = 1 << 30
GB = 10**9
UNITS = {"memory": GIB, "flops": 1e12, "fp32": 1e12, "bandwidth": GB, "peers": GB, "host": GB}
"""Unit of a field in `gpus.json`."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """A kind of device, with its highest possible rates."""

    name: str
    """Part of the device's own name."""
    memory: int
    """Bytes that programs can allocate, as the driver reports."""
    flops: float
    """Dense 16-bit floating-point operations per second with 32-bit accumulation."""
    flops_fp32: float
    """The same in 32 bits, without TF32."""
    bandwidth: float
    """Bytes per second between it and its own memory."""
    peers: float
    """Bytes per second to the other devices of its node, in one direction."""
    host: float
    """Bytes per second to or from the host's memory, in one direction."""
    bf16: bool = True
    """Whether it has units for bf16."""
    matmul: float = 0.8
    """Share of `flops` that large products of matrices reach."""

    @property
    def on_pcie(self) -> bool:
        """Whether it is a card, which reaches others over PCIe too, not a module in a socket."""
        return self.peers == self.host

    def rate(self, compute: str) -> float:
        """Operations per second in `fp32`, `bf16` or `fp16`. Without units for bf16, it is emulated
        in fp32, at no more than its rate."""
        wide = compute == "fp32" or (compute == "bf16" and not self.bf16)
        return self.flops_fp32 if wide else self.flops


@functools.cache
def accelerators() -> tuple[Accelerator, ...]:
    """The known accelerators, as `gpus.json` has them (more specific names first; GiB, dense
    TFLOP/s, GB/s).

    Arithmetic, memory and links are from the vendors' data sheets and architecture white papers;
    rates of GeForce cards are for products with 32-bit accumulation, at half the rate of 16 bits.
    Memory is a little less than printed on the box: the driver takes some. The MI250X is one of its
    two dies, each a separate device. `matmul` is the share of the arithmetic that large products in
    bf16 reached in the table "Maximum Achievable Matmul FLOPS" of S. Bekman, Machine Learning
    Engineering (github.com/stas00/ml-engineering, 2025): 80 % on an H100, which is assumed of the
    others."""
    found = []
    for name, fields in json.loads(Path(__file__).with_suffix(".json").read_bytes()).items():
        values = {key: value * UNITS.get(key, 1) for key, value in fields.items()}
        values |= {"memory": round(values["memory"]), "flops_fp32": values.pop("fp32")}
        found.append(Accelerator(name=name, **values))
    return tuple(found)


COMMON = {
    "nvidia", "geforce", "tesla", "amd", "instinct", "gpu", "tensor", "core", "generation", "rtx",
    "workstation", "edition", "ac", "hbm2", "hbm2e", "hbm3", "hbm3e",
}  # fmt: skip
"""Words for makers, series and kinds of memory, which distinguish no devices."""
SOCKETS = {"sxm", "sxm2", "sxm3", "sxm4", "sxm5", "sxm6", "oam"}
PRINTED = 0.9
"""Least share of the memory printed on the box that can be allocated."""


def find_accelerator(name: str) -> Accelerator | None:
    """The first device whose words are all in `name`, if the rest of `name` does not contradict it.
    None for an unknown device, such as a laptop's, a part of a GPU, or another memory size."""
    words = _words(name)
    for device in accelerators():
        own = _words(device.name)
        if own <= words and all(_suits(device, word) for word in words - own):
            return device
    return None


def _suits(device: Accelerator, word: str) -> bool:
    """Whether a word that is not in the device's name is true of it."""
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
    "10gbe": 1.25 * GB, "25gbe": 3.125 * GB, "100gbe": 12.5 * GB,
    "200g": 25 * GB, "400g": 50 * GB, "800g": 100 * GB,
}  # fmt: skip
"""Name of a link -> bytes per second in one direction."""

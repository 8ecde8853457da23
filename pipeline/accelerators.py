"""Accelerators by name: memory, arithmetic and links, by the vendors' data sheets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

GIB = 1 << 30
GB = 10**9


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device. Rates are the most that is possible."""

    name: str
    """Part of the device's own name."""
    memory: int
    """Bytes that programs can take, as its driver tells."""
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

    @property
    def on_pcie(self) -> bool:
        """Whether PCIe is how it reaches others too: a card, not a module in a socket."""
        return self.peers == self.host

    def rate(self, compute: str) -> float:
        """The most operations a second in `fp32`, `bf16` or `fp16`. Without units for bf16 it is
        emulated in fp32, whose rate it stays below."""
        wide = compute == "fp32" or (compute == "bf16" and not self.bf16)
        return self.flops_fp32 if wide else self.flops


def _device(
    name: str, gib: float, tflops: float, fp32: float, memory_gbs: float, peers_gbs: float,
    host_gbs: float, *, bf16: bool = True,
) -> Accelerator:  # fmt: skip
    return Accelerator(
        name=name,
        memory=round(gib * GIB),
        flops=tflops * 1e12,
        flops_fp32=fp32 * 1e12,
        bandwidth=memory_gbs * GB,
        peers=peers_gbs * GB,
        host=host_gbs * GB,
        bf16=bf16,
    )


ACCELERATORS = (
    _device("B200", 178.3, 2250, 80, 8000, 900, 64),
    _device("H200", 139.8, 989.5, 67, 4800, 450, 64),
    _device("H100 PCIe", 79.2, 756.5, 51, 2000, 64, 64),
    _device("H100 NVL", 93.1, 835.5, 60, 3900, 300, 64),
    _device("H100", 79.2, 989.5, 67, 3350, 450, 64),
    _device("H800 PCIe", 79.2, 756.5, 51, 2000, 64, 64),
    _device("H800", 79.2, 989.5, 67, 3350, 200, 64),
    _device("A100 40GB PCIe", 39.4, 312, 19.5, 1555, 32, 32),
    _device("A100 40GB", 39.4, 312, 19.5, 1555, 300, 32),
    _device("A100 PCIe", 79.2, 312, 19.5, 1935, 32, 32),
    _device("A100", 79.2, 312, 19.5, 2039, 300, 32),
    _device("A800 PCIe", 79.2, 312, 19.5, 1935, 32, 32),
    _device("A800", 79.2, 312, 19.5, 2039, 200, 32),
    _device("L40S", 44.4, 362, 91.6, 864, 32, 32),
    _device("L40", 44.4, 181, 90.5, 864, 32, 32),
    _device("L4", 22.0, 121, 30.3, 300, 32, 32),
    _device("A10G", 22.0, 70, 35, 600, 32, 32),
    _device("A10", 22.0, 125, 31.2, 600, 32, 32),
    _device("V100 16GB PCIe", 15.7, 112, 14, 900, 16, 16, bf16=False),
    _device("V100 16GB", 15.7, 125, 15.7, 900, 150, 16, bf16=False),
    _device("V100 PCIe", 31.7, 112, 14, 900, 16, 16, bf16=False),
    _device("V100", 31.7, 125, 15.7, 900, 150, 16, bf16=False),
    _device("RTX 4090", 23.6, 165.2, 82.6, 1008, 32, 32),
    _device("RTX 6000 Ada", 47.5, 364.2, 91.1, 960, 32, 32),
    _device("RTX A6000", 47.5, 154.8, 38.7, 768, 32, 32),
    _device("RTX 3090", 23.6, 71, 35.6, 936, 32, 32),
    _device("MI300X", 191.5, 1307.4, 163.4, 5300, 448, 64),
    _device("MI250X", 63.9, 191.5, 47.9, 1638, 250, 36),
)
"""The more particular name first. Of the MI250X: one of its two dies, a device of its own.
Memory is a little less than what is printed on the box: the driver takes some."""


COMMON = {
    "nvidia", "geforce", "tesla", "amd", "instinct", "gpu", "tensor", "core", "generation",
    "hbm2", "hbm2e", "hbm3", "hbm3e",
}  # fmt: skip
"""Words for makers, series and kinds of memory, which tell no devices apart."""
SOCKETS = {"sxm", "sxm2", "sxm3", "sxm4", "sxm5", "sxm6", "oam"}
PRINTED = 0.9
"""At least this share of the memory that is printed on the box can be taken."""


def find_accelerator(name: str) -> Accelerator | None:
    """The first device all words of whose name are in `name`, if the rest of `name` contradicts
    nothing: None for one that is not known, as a laptop's, a part of a GPU, or one with another
    memory."""
    words = _words(name)
    return next((device for device in ACCELERATORS if _is(device, words)), None)


def _is(device: Accelerator, words: set[str]) -> bool:
    own = _words(device.name)
    return own <= words and all(_suits(device, word) for word in words - own - COMMON)


def _suits(device: Accelerator, word: str) -> bool:
    """Whether a word that is not in its name says what the device has."""
    if word == "pcie" or word in SOCKETS:
        return device.on_pcie == (word == "pcie")
    size = re.fullmatch(r"([0-9]+)gb", word)
    return size is not None and PRINTED * int(size[1]) <= device.memory / GIB <= int(size[1])


def _words(name: str) -> set[str]:
    apart = re.sub(r"\brtx(?=[0-9a])", "rtx ", name.lower())
    joined = re.sub(r"\b([0-9]+)\s*(?:g|gb|gib)\b", r"\1gb", apart)
    return set(re.split(r"[-_\s]+", joined.strip()))


NETWORKS: Mapping[str, float] = {
    "10gbe": 1.25 * GB,
    "25gbe": 3.125 * GB,
    "100gbe": 12.5 * GB,
    "200g": 25 * GB,
    "400g": 50 * GB,
    "800g": 100 * GB,
}
"""Name of a link -> bytes a second in one direction."""

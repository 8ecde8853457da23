"""The GPUs and what connects them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.doctor.gpu_topology import is_nvlink
from pipeline.doctor.report import Link, MachineReport
from pipeline.doctor.rules.finding import Finding
from pipeline.utils.text import human

BF16_CAPABILITY = (8, 0)
MOSTLY_FREE = 0.9
"""CUDA itself, and a desktop, take some of a GPU's memory."""
MOST_NAMED = 4
PATHS = {
    "PIX": "one PCIe bridge",
    "PXB": "several PCIe bridges",
    "PHB": "a PCIe host bridge, the processor",
    "NODE": "several host bridges of a processor",
    "SYS": "the link between processors",
}


def no_bf16(machine: MachineReport) -> Iterator[Finding]:
    """bf16 came with compute capability 8.0."""
    old = [
        device
        for device in machine.devices
        if device.compute_capability and _version(device.compute_capability) < BF16_CAPABILITY
    ]
    if old:
        yield Finding(
            severity="warning",
            name="bf16",
            seen=f"{old[0].name} has compute capability {old[0].compute_capability}, below 8.0",
            why="it has no bf16 arithmetic: `compute: bf16` is emulated, or fails",
            do="use `compute: fp16` in the recipe's precision slot",
        )


def unlike(machine: MachineReport) -> Iterator[Finding]:
    """All ranks wait for the slowest, and have room for what the smallest has."""
    kinds = {device.name for device in machine.devices}
    if len(kinds) > 1:
        yield Finding(
            severity="warning",
            name="unlike-gpus",
            seen=f"GPUs of different kinds: {', '.join(sorted(kinds))}",
            why="every step waits for the slowest, and the smallest memory decides what fits",
            do="choose GPUs of one kind with CUDA_VISIBLE_DEVICES",
        )


def in_use(machine: MachineReport) -> Iterator[Finding]:
    """Another process computes there, or did and still holds memory."""
    for name, device in machine.gpus.items():
        free = device.memory_free_bytes
        if free is not None and free < MOSTLY_FREE * device.memory_bytes:
            yield Finding(
                severity="warning",
                name="gpu-in-use",
                seen=f"{name} has {human(free)} of {human(device.memory_bytes)} free",
                why="another process holds the rest: training may run out of memory",
                do="nvidia-smi shows whose it is; end that process or choose other GPUs",
            )


def slow_links(machine: MachineReport) -> Iterator[Finding]:
    """Pairs without NVLink, the slowest kind in a finding of its own."""
    links = machine.topology.links
    across = [link for link in links if link.kind == "SYS"]
    slow = [link for link in links if not is_nvlink(link) and link.kind != "SYS"]
    if across:
        yield Finding(
            severity="warning",
            name="across-numa",
            seen=f"{_pairs(across)}: only over the link between processors (SYS)",
            why="all processes' exchange goes at the speed of the slowest pair",
            do="train on the GPUs of one processor (CUDA_VISIBLE_DEVICES), exchange less "
            "often (accumulate gradients), or shard within a processor only",
        )
    if slow:
        kinds = sorted({link.kind for link in slow})
        over = ", ".join(f"{kind}: {PATHS.get(kind, 'unknown')}" for kind in kinds)
        yield Finding(
            severity="warning",
            name="no-nvlink",
            seen=f"{_pairs(slow)}: no NVLink ({over})",
            why="sharded training moves all weights in every step, and PCIe is much slower",
            do="use GPUs that NVLink connects, or exchange less often (accumulate gradients)",
        )


def _pairs(links: Sequence[Link]) -> str:
    named = ", ".join(f"{link.a}-{link.b}" for link in links[:MOST_NAMED])
    more = len(links) - MOST_NAMED
    return f"{named} and {more} more pairs" if more > 0 else named


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


RULES = (no_bf16, unlike, in_use, slow_links)

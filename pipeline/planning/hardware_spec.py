"""Machines, as far as planning needs them."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.accelerators import GIB


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Machines of one kind. None: not known, so nothing is said that depends on it."""

    kind: str | None = None
    """Name of a device; None on CPUs, and for a device of which only the memory is known."""
    device_memory: int | None = None
    """Bytes of one device; of a rank's share of host memory on CPUs."""
    host_memory: int | None = None
    """Bytes of one node."""
    network: float | None = None
    """Bytes a second that a node sends to others, in one direction, over all its links."""
    peers: float | None = None
    """Bytes a second that a device sends to others in its node."""
    host_link: float | None = None
    """Bytes a second between a device and its machine, in each direction."""
    disk_rate: float | None = None
    """Bytes a second of the disk that state is offloaded to."""
    flops: float | None = None
    """Operations a second of one device in the compute dtype."""
    bandwidth: float | None = None
    """Bytes a second between a device and its own memory."""
    measured: tuple[str, ...] = ()
    """Those of the fields above that are rates which programs reach, as `pipe doctor` measures
    them."""
    asked: tuple[str, ...] = ()
    """Those that are what a person says; the others are what data sheets promise."""
    caveats: tuple[str, ...] = ()
    """What the rates leave out of account."""


OVERHEAD = round(1.5 * GIB)
"""Bytes of a GPU that are taken beside tensors: the CUDA context, libraries' workspaces, NCCL's
buffers. An assumption; `--overhead` replaces it."""
FRAGMENTATION = 0.03
"""Share of tensors' bytes that torch's allocator loses between them on GPUs. An assumption."""

"""Where a run is to happen: machines, as far as arithmetic needs them."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.accelerators import GIB
from pipeline.forecast.ledger import Ledger


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


@dataclass(frozen=True, kw_only=True)
class Site:
    """What a stage's `forecast` is told besides the forecasts of other stages."""

    ranks: int
    """Processes over all nodes, one a device."""
    local_ranks: int
    """Of one node."""
    device: str
    """`cpu` or `cuda`."""
    ledger: Ledger = field(default_factory=Ledger)
    """Of the rank that holds the most."""

    @property
    def nodes(self) -> int:
        """Machines."""
        return -(-self.ranks // self.local_ranks)


OVERHEAD = round(1.5 * GIB)
"""Bytes of a GPU that are taken beside tensors: the CUDA context, libraries' workspaces, NCCL's
buffers. An assumption; `--overhead` replaces it."""
FRAGMENTATION = 0.03
"""Share of tensors' bytes that torch's allocator loses between them on GPUs. An assumption."""
PROCESS = round(0.6 * GIB)
"""Bytes of host memory of a process that has loaded the libraries, measured on CPUs."""

"""What other machines are reached by."""

from __future__ import annotations

from pathlib import Path

import psutil

from pipeline.doctor.report import Interface, Network

MEGABIT = 1e6


def network() -> Network:
    """Interfaces that are up, and RDMA devices. A speed that the driver does not tell is None."""
    interfaces = tuple(
        Interface(name=name, bits_per_s=state.speed * MEGABIT or None)
        for name, state in sorted(psutil.net_if_stats().items())
        if state.isup and "loopback" not in state.flags.split(",")
    )
    rdma = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    return Network(interfaces=interfaces, rdma=tuple(rdma))

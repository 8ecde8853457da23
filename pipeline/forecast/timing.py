"""How long a step takes at least, by what its parts move and compute.

Collectives are counted as the bandwidth-optimal algorithms move them (Patarasuk & Yuan 2009,
Bandwidth optimal all-reduce algorithms): of S bytes over n ranks, each rank sends S (n - 1) / n for
an all-gather or a reduce-scatter, and twice that for an all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.forecast.placement import Traffic
from pipeline.forecast.result import Forecast
from pipeline.forecast.site import Hardware, Site

COMPUTE, MEMORY, NETWORK, DISK = "compute", "memory", "network", "NVMe"
UP, DOWN = "PCIe to the GPU", "PCIe to the host"
"""Directions that a link has at once."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Of one optimizer step, in seconds."""

    parts: Mapping[str, float]
    """Resource -> how long it is busy at its full rate."""
    unknown: Sequence[str]
    """Resources that are used, whose rate is not known."""

    @property
    def least(self) -> float:
        """When everything overlaps."""
        return max(self.parts.values(), default=0.0)

    @property
    def most(self) -> float:
        """When nothing does, at the same rates."""
        return sum(self.parts.values())

    @property
    def bound(self) -> str:
        """The resource that is busy the longest; empty without any."""
        return max(self.parts, key=lambda part: self.parts[part], default="")


def step_time(forecast: Forecast, site: Site, hardware: Hardware) -> StepTime | None:
    """None when no step is made. What the hardware says nothing of is left out, and named."""
    step = forecast.step
    if step is None:
        return None
    local = min(site.local_ranks, site.ranks)
    needs: list[tuple[str, float, float | None]] = [
        (COMPUTE, step.work.total, hardware.flops),
        (MEMORY, float(step.moved), hardware.bandwidth),
        (UP, float(forecast.copies.up), hardware.host_link),
        (DOWN, float(forecast.copies.down), hardware.host_link),
        (DISK, float(forecast.copies.disk * local), hardware.disk_rate),
    ]
    parts = {name: amount / rate for name, amount, rate in needs if amount and rate}
    unknown = [name for name, amount, rate in needs if amount and not rate]
    network = 0.0
    for traffic in forecast.traffic:
        rate = _rate(traffic, site, hardware)
        if rate:
            network += sent(traffic) / rate
        elif NETWORK not in unknown:
            unknown.append(NETWORK)
    if network:
        parts[NETWORK] = network
    return StepTime(parts=parts, unknown=unknown)


def sent(traffic: Traffic) -> float:
    """Bytes that each rank sends."""
    passes = 2 if traffic.collective == "all-reduce" else 1
    return passes * traffic.bytes * (traffic.ranks - 1) / traffic.ranks


def crosses(traffic: Traffic, site: Site) -> bool:
    """Whether some of its groups have ranks on several nodes."""
    return _rings(traffic, site) > 0


def _rings(traffic: Traffic, site: Site) -> int:
    """Groups that have ranks on a node and on others too; of the node that has most of them."""
    return max(_shared(traffic, site, node) for node in _telling(traffic, site))


def _shared(traffic: Traffic, site: Site, node: int) -> int:
    """Groups that have ranks on this node and on others too."""
    span, local = traffic.ranks * traffic.apart, site.local_ranks
    here = range(node * local, min((node + 1) * local, site.ranks))
    firsts = {rank // span * span + rank % traffic.apart for rank in here}
    return sum(first // local != (first + span - traffic.apart) // local for first in firsts)


def _telling(traffic: Traffic, site: Site) -> Iterator[int]:
    """Nodes of which one has as many such groups as any. Groups that interleave make a block; each
    node in which a block begins, and the one after, since further ones in a block are like that.
    After as many blocks as a node has ranks, they begin at the same places again."""
    span = traffic.ranks * traffic.apart
    blocks = min(site.local_ranks, -(-site.ranks // span)) if site.nodes > 1 else 1
    for block in range(blocks):
        first = block * span // site.local_ranks
        yield from range(first, min(first + 2, site.nodes))


def _rate(traffic: Traffic, site: Site, hardware: Hardware) -> float | None:
    """Bytes a second for each rank: its share of what its node sends, where nodes are crossed. Of a
    ring through several nodes only one rank of a node sends to the next."""
    rings = _rings(traffic, site)
    if not rings:
        return hardware.peers
    if hardware.network is None:
        return None
    across = hardware.network / rings
    return min(across, hardware.peers) if hardware.peers else across

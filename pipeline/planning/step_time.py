"""How long a step takes at least, by what its parts move and compute.

Collectives are counted as the bandwidth-optimal algorithms move them (Patarasuk & Yuan 2009,
Bandwidth optimal all-reduce algorithms): of S bytes over n ranks, each rank sends S (n - 1) / n for
an all-gather or a reduce-scatter, and twice that for an all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.planning.estimate import Estimate
from pipeline.planning.hardware_spec import Hardware
from pipeline.planning.strategy import Traffic
from pipeline.planning.topology import Topology

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


def step_time(estimate: Estimate, topology: Topology, hardware: Hardware) -> StepTime | None:
    """None when no step is made. What the hardware says nothing of is left out, and named."""
    local = min(topology.local_ranks, topology.ranks)
    needs: list[tuple[str, float, float | None]] = [
        (COMPUTE, estimate.work.total, hardware.flops),
        (MEMORY, estimate.work.moved, hardware.bandwidth),
        (UP, float(estimate.copies.up), hardware.host_link),
        (DOWN, float(estimate.copies.down), hardware.host_link),
        (DISK, float(estimate.copies.disk * local), hardware.disk_rate),
    ]
    parts = {name: amount / rate for name, amount, rate in needs if amount and rate}
    unknown = [name for name, amount, rate in needs if amount and not rate]
    network = 0.0
    for traffic in estimate.traffic:
        rate = _rate(traffic, topology, hardware)
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


def crosses(traffic: Traffic, topology: Topology) -> bool:
    """Whether some of its groups have ranks on several nodes."""
    return _rings(traffic, topology) > 0


def _rings(traffic: Traffic, topology: Topology) -> int:
    """Groups that have ranks on a node and on others too; of the node that has most of them."""
    return max(_shared(traffic, topology, node) for node in _telling(traffic, topology))


def _shared(traffic: Traffic, topology: Topology, node: int) -> int:
    """Groups that have ranks on this node and on others too."""
    span, local = traffic.ranks * traffic.apart, topology.local_ranks
    here = range(node * local, min((node + 1) * local, topology.ranks))
    firsts = {rank // span * span + rank % traffic.apart for rank in here}
    return sum(first // local != (first + span - traffic.apart) // local for first in firsts)


def _telling(traffic: Traffic, topology: Topology) -> Iterator[int]:
    """Nodes of which one has as many such groups as any. Groups that interleave make a block; each
    node in which a block begins, and the one after, since further ones in a block are like that.
    After as many blocks as a node has ranks, they begin at the same places again."""
    span = traffic.ranks * traffic.apart
    blocks = min(topology.local_ranks, -(-topology.ranks // span)) if topology.nodes > 1 else 1
    for block in range(blocks):
        first = block * span // topology.local_ranks
        yield from range(first, min(first + 2, topology.nodes))


def _rate(traffic: Traffic, topology: Topology, hardware: Hardware) -> float | None:
    """Bytes a second for each rank: its share of what its node sends, where nodes are crossed. Of a
    ring through several nodes only one rank of a node sends to the next."""
    rings = _rings(traffic, topology)
    if not rings:
        return hardware.peers
    if hardware.network is None:
        return None
    across = hardware.network / rings
    return min(across, hardware.peers) if hardware.peers else across

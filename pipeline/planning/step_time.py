"""How long a step takes: at least, and as is to be expected.

Collectives are counted as the bandwidth-optimal algorithms move them (Patarasuk & Yuan 2009,
Bandwidth optimal all-reduce algorithms): of S bytes over n ranks, each rank sends S (n - 1) / n for
an all-gather or a reduce-scatter, and twice that for an all-reduce.

The bound takes every resource at its full rate, all at once. The expectation takes the share of a
rate that programs reach, and adds what is not hidden behind the resource that is busy the longest.
Its constants were chosen on 37 trainings whose tokens a second torchtitan, llm-foundry, IBM,
torchtune and NeMo published (1 to 128 A100s and H100s): it is 0.60 to 1.16 of the real step, within
20 % in 30 of them, in the median 0.97; 1.02 on A100s, 0.83 on H100s, whose software was new then.
`benchmarks/published.py` compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.planning.estimate import Estimate
from pipeline.planning.hardware import Hardware
from pipeline.planning.planner import Topology
from pipeline.planning.strategy import Traffic

COMPUTE, MEMORY, DISK = "compute", "memory", "NVMe"
INSIDE, BETWEEN = "network inside nodes", "network between nodes"
UP, DOWN = "PCIe to the GPU", "PCIe to the host"
"""Directions that a link has at once."""
RATES = {
    COMPUTE: "flops", MEMORY: "bandwidth", INSIDE: "peers", BETWEEN: "network", UP: "host_link",
    DOWN: "host_link", DISK: "disk_rate",
}  # fmt: skip
"""Resource -> the hardware's field for its rate."""

PRODUCTS = 0.8
"""A training's products of matrices against the best ones (`Accelerator.matmul`): 70 % of an A100's
peak, 64 % of an H100's. Fitted to the throughputs above."""
ATTENTION = 0.55
"""Rate of attention kernels against that of products. Forward and backward of FlashAttention-2
reach about 190 TFLOP/s on an A100 (Dao 2023) and 350 on an H100 (Shah et al. 2024) on long causal
samples: 0.7 and 0.45 of the best products."""
REACHED = {MEMORY: 0.75, INSIDE: 0.75, BETWEEN: 0.75, UP: 0.8, DOWN: 0.8}
"""Share of a data sheet's rate that programs reach. Copies within a GPU's memory reach nine tenths;
kernels of a step are smaller. NCCL's large all-reduces reach 230 of an A100's 300 GB/s (nccl-tests,
8 GPUs), and a node's links between nodes as much of theirs."""
EXPOSED = 0.2
"""Share of what is done beside the longest that adds to a step's time all the same: the first
gather of a pass and the last reduction wait, and collectives take processors from products. Fitted
to the throughputs above."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step."""

    parts: Mapping[str, float]
    """Resource -> how long it is busy at its full rate."""
    reached: Mapping[str, float]
    """Resource -> how long it is busy at the rate that programs reach."""
    unknown: Sequence[str]
    """Resources that are used, whose rate is not known."""
    overlaps: bool
    """Whether they work at once, as a GPU and its links do; the cores of a CPU do everything."""

    @property
    def least(self) -> float:
        """When everything overlaps, at full rates: no step is shorter."""
        return max(self.parts.values(), default=0.0)

    @property
    def expected(self) -> float:
        """At the rates that programs reach, with most of what can overlap hidden."""
        busy = dict(self.reached)
        device = busy.pop(COMPUTE, 0.0) + busy.pop(MEMORY, 0.0)
        longest = max(device, *busy.values(), 0.0)
        hidden = (1 - EXPOSED) * (device + sum(busy.values()) - longest)
        return sum(self.reached.values()) - (hidden if self.overlaps else 0.0)

    @property
    def network(self) -> float:
        """How long the networks are busy, at the rates that programs reach."""
        return self.reached.get(INSIDE, 0.0) + self.reached.get(BETWEEN, 0.0)

    @property
    def bound(self) -> str:
        """The resource that is busy the longest; empty without any."""
        return max(self.parts, key=lambda part: self.parts[part], default="")


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Rates and totals that follow from the expected time of a step."""

    tokens_per_second: float
    """Over all ranks, padding counted."""
    tokens_per_second_per_rank: float
    mfu: float | None
    """Model FLOPs utilisation: the model's operations, nothing computed twice and attention only
    between tokens that see each other, against the data sheet's peak."""
    hours: float | None
    """Hours of the whole training; None where its number of steps is not known."""
    cost: float | None
    """Price of all ranks for that long."""


def origin(part: str, hardware: Hardware) -> str:
    """Where a resource's rate comes from."""
    if RATES[part] in hardware.measured:
        return "measured rate"
    return "rate asked for" if RATES[part] in hardware.asked else "data sheet"


class _Use(NamedTuple):
    """Something that a resource does in a step."""

    part: str
    amount: float
    """Operations or bytes."""
    rate: float | None
    """Operations or bytes a second; None: not known."""
    share: float
    """Share of the rate that programs reach."""


def step_time(estimate: Estimate, topology: Topology, hardware: Hardware) -> StepTime:
    """The time of a step. What the hardware says nothing of is left out, and named."""
    parts: dict[str, float] = {}
    reached: dict[str, float] = {}
    unknown: list[str] = []
    for part, amount, rate, share in _uses(estimate, topology, hardware):
        if amount and rate:
            parts[part] = parts.get(part, 0.0) + amount / rate
            reached[part] = reached.get(part, 0.0) + amount / rate / share
        elif amount and part not in unknown:
            unknown.append(part)
    return StepTime(
        parts=parts, reached=reached, unknown=unknown, overlaps=topology.device != "cpu"
    )


def speed(
    time: StepTime, estimate: Estimate, topology: Topology, hardware: Hardware
) -> Speed | None:
    """The speed of a training; None where a part of the time is not known."""
    if time.unknown or not time.expected:
        return None
    step, seconds = estimate.step, time.expected
    steps, price, peak = step.length.steps, hardware.price, hardware.peak
    hours = None if steps is None else steps * seconds / 3600
    return Speed(
        tokens_per_second=step.tokens / seconds,
        tokens_per_second_per_rank=step.tokens / seconds / topology.ranks,
        mfu=None if peak is None else estimate.work.useful / (seconds * peak),
        hours=hours,
        cost=None if hours is None or price is None else hours * topology.ranks * price,
    )


def _uses(estimate: Estimate, topology: Topology, hardware: Hardware) -> Iterator[_Use]:
    work, copies = estimate.work, estimate.copies
    products = hardware.matmul * (1.0 if "flops" in hardware.measured else PRODUCTS)
    yield _Use(COMPUTE, work.products + work.again, hardware.flops, products)
    yield _Use(COMPUTE, work.attention, hardware.flops, products * ATTENTION)
    others = [
        (MEMORY, work.moved, hardware.bandwidth),
        (UP, copies.up, hardware.host_link),
        (DOWN, copies.down, hardware.host_link),
        (DISK, copies.disk * topology.on_node, hardware.disk_rate),
    ]
    for traffic in estimate.traffic:
        part = BETWEEN if crosses(traffic, topology) else INSIDE
        others.append((part, sent(traffic), _rate(traffic, topology, hardware)))
    for part, amount, rate in others:
        measured = RATES[part] in hardware.measured
        yield _Use(part, amount, rate, 1.0 if measured else REACHED.get(part, 1.0))


def sent(traffic: Traffic) -> float:
    """Bytes that each rank sends."""
    passes = 2 if traffic.collective == "all-reduce" else 1
    return passes * traffic.bytes * (traffic.ranks - 1) / traffic.ranks


def crosses(traffic: Traffic, topology: Topology) -> bool:
    """Whether some of its groups have ranks on several nodes."""
    return _rings(traffic, topology) > 0


def _rings(traffic: Traffic, topology: Topology) -> int:
    """Groups of a node that have ranks on others too: as many where groups and nodes divide each
    other, else at most."""
    span, local = traffic.ranks * traffic.apart, topology.local_ranks
    if topology.nodes == 1 or local % span == 0:
        return 0
    aligned = span % local == 0 or span == topology.ranks
    return min(traffic.apart * (1 if aligned else 2), local)


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

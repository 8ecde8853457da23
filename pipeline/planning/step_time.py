"""Time of a step: a lower bound and an expectation.

The constants of the expectation were fitted on 37 trainings whose throughput torchtitan,
llm-foundry, IBM, torchtune and NeMo published; docs/dev/planning.md says how close it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.planning.estimate import Estimate
from pipeline.planning.forecast import Traffic
from pipeline.planning.hardware import BETWEEN, COMPUTE, DISK, DOWN, INSIDE, MEMORY, UP, Hardware
from pipeline.planning.shapes import Topology

PRODUCTS = 0.8
"""Rate of a training's matrix products against the best ones (`Accelerator.matmul`): 70 % of an
A100's peak, 64 % of an H100's. Fitted to the throughputs above."""
ATTENTION = 0.55
"""Rate of attention kernels, as a part of the rate of products. Forward and backward of
FlashAttention-2 reach about 190 TFLOP/s on an A100 (Dao 2023) and 350 on an H100 (Shah et al. 2024)
on long causal samples: 0.7 and 0.45 of the best products."""
REACHED = {MEMORY: 0.75, INSIDE: 0.75, BETWEEN: 0.75, UP: 0.8, DOWN: 0.8}
"""Share of a data sheet's rate that programs reach. Copies within a GPU's memory reach nine tenths;
kernels of a step are smaller. NCCL's large all-reduces reach 230 of an A100's 300 GB/s (nccl-tests,
8 GPUs), and the same share between nodes."""
EXPOSED = 0.2
"""Share of shorter, overlapped work that adds to a step's time: the first gather of a pass and the
last reduction wait, and collectives take processors from products. Fitted likewise."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of an optimizer step by resource: at its full rate (`parts`), and at the rate that
    programs reach; the resources of unknown rate; and whether resources work at once, as a GPU and
    its links do. waits: seconds of `reached` in which computation waits for exchanges inside of the
    model. idle: share of the step in which a rank of a pipeline waits for others."""

    parts: Mapping[str, float]
    reached: Mapping[str, float]
    unknown: Sequence[str]
    overlaps: bool
    waits: Mapping[str, float] = field(default_factory=dict)
    idle: float = 0.0

    @property
    def least(self) -> float:
        """Lower bound: everything overlaps, at full rates."""
        computing = self.parts.get(COMPUTE, 0.0) / (1 - self.idle)
        return max(*self.parts.values(), computing, 0.0)

    @property
    def expected(self) -> float:
        """Seconds at the rates that programs reach, with most of what can overlap hidden."""
        busy = {part: time - self.waits.get(part, 0.0) for part, time in self.reached.items()}
        device = busy.pop(COMPUTE, 0.0) + busy.pop(MEMORY, 0.0) + sum(self.waits.values())
        longest = max(device, *busy.values(), 0.0)
        hidden = (1 - EXPOSED) * (device + sum(busy.values()) - longest)
        total = sum(self.reached.values()) - (hidden if self.overlaps else 0.0)
        return total / (1 - self.idle)

    @property
    def bound(self) -> str:
        """The resource that is busy the longest; empty without one."""
        return max(self.parts, key=lambda part: self.parts[part], default="")


def step_time(estimate: Estimate, topology: Topology, hardware: Hardware) -> StepTime:
    """Estimate the time of a step. Resources without a known rate are left out, and named."""
    parts, reached, waits = dict[str, float](), dict[str, float](), dict[str, float]()
    unknown: dict[str, None] = {}
    shares = REACHED | {COMPUTE: hardware.matmul * PRODUCTS}
    work, copies, rates = estimate.work, estimate.copies, hardware.rates
    most = rates[BETWEEN].value / rates[INSIDE].value if {BETWEEN, INSIDE} <= {*rates} else 0.0
    # Each resource, its amount in a step, a factor of time, and whether computation waits.
    uses: list[tuple[str, float, float, bool]] = [
        (COMPUTE, work.products + work.again, 1.0, False),
        (COMPUTE, work.attention, 1 / ATTENTION, False),
        (MEMORY, work.moved, 1.0, False),
        (UP, copies.up, 1.0, False),
        (DOWN, copies.down, 1.0, False),
        (DISK, copies.disk * topology.on_node, 1.0, False),
    ]
    for traffic in estimate.traffic:
        size, out = sent(traffic), leaving(traffic, topology)
        # No faster to another node than to ranks of the same one.
        part, amount = (BETWEEN, max(out, size * most)) if out else (INSIDE, size)
        uses.append((part, amount, 1.0, traffic.waits))
    for part, amount, slower, waited in uses:
        rate = rates.get(part)
        if amount and rate is None:
            unknown[part] = None
        elif amount and rate is not None:
            share = 1.0 if rate.measured else shares.get(part, 1.0)
            seconds = amount / rate.value / share * slower
            parts[part] = parts.get(part, 0.0) + amount / rate.value
            reached[part] = reached.get(part, 0.0) + seconds
            waits |= {part: waits.get(part, 0.0) + seconds} if waited else {}
    return StepTime(
        parts=parts, reached=reached, unknown=[*unknown], waits=waits,
        overlaps=topology.device != "cpu", idle=estimate.work.idle,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Speed of a training, with padding. mfu: the model's operations (none twice, attention only
    between tokens that see each other) against the data sheet's peak. hours, cost: of all steps on
    all ranks. None: not known."""

    tokens_per_second: float
    mfu: float | None
    hours: float | None
    cost: float | None


def speed(
    time: StepTime, estimate: Estimate, topology: Topology, hardware: Hardware
) -> Speed | None:
    """Speed at the expected time of a step; None if a resource's rate is not known."""
    if time.unknown or not time.expected:
        return None
    work, seconds, peak = estimate.work, time.expected, hardware.peak
    steps = estimate.step.length.steps
    hours = steps and steps * seconds / 3600
    return Speed(
        tokens_per_second=estimate.step.tokens / seconds,
        mfu=peak and (work.products + work.attention) / (seconds * peak),
        hours=hours,
        cost=hours and hardware.price and hours * topology.ranks * hardware.price,
    )


def sent(traffic: Traffic) -> float:
    """Bytes that each rank sends, by the bandwidth-optimal algorithms (Patarasuk & Yuan 2009)."""
    if traffic.collective == "send":
        return float(traffic.bytes)
    passes = 2 if traffic.collective == "all-reduce" else 1
    return passes * traffic.bytes * (traffic.ranks - 1) / traffic.ranks


def crossing(traffic: Traffic, topology: Topology) -> int:
    """Number of a node's groups that span nodes, if groups and nodes divide each other."""
    local = topology.local_ranks
    within = topology.nodes == 1 or local % (traffic.ranks * traffic.apart) == 0
    return 0 if within else min(traffic.apart, local)


def leaving(traffic: Traffic, topology: Topology) -> float:
    """Bytes that leave a node; 0 for groups within nodes. In a ring, one rank of a node sends to
    the next node; in an all-to-all every rank does."""
    groups = crossing(traffic, topology)
    if not groups or traffic.collective != "all-to-all":
        return sent(traffic) * groups
    within = max(topology.local_ranks // traffic.apart, 1)
    return topology.local_ranks * traffic.bytes * (traffic.ranks - within) / traffic.ranks

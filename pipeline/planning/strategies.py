"""Compare the strategies that installed stages offer, each with as little saved as it needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from pipeline.errors import PipeError, RecipeError, UsageError
from pipeline.planning.hardware import Asked
from pipeline.planning.memory_plan import MemoryPlan
from pipeline.planning.planner import Tier
from pipeline.planning.report import gib
from pipeline.planning.search import Base, Changes, Way, best, overrides, seconds, ways
from pipeline.planning.topology import Topology
from pipeline.presets import Strategy

MOST_NODES = 512
"""How far more nodes are looked for."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way of one strategy."""

    strategy: Strategy
    way: Way

    @property
    def what(self) -> str:
        """The strategy, and what is saved besides."""
        saved = {path: value for one in self.way.saved for path, value in one.changes.items()}
        name = f"{self.strategy.name} ({self.strategy.what})"
        return f"{name} with {' '.join(overrides(saved))}" if saved else name

    @property
    def numbers(self) -> str:
        """Memory and time, for people."""
        drawn = self.way.drawn
        parts = [memory(drawn), *_time(drawn)]
        if drawn.idle:
            parts.append(f"{drawn.idle} of {drawn.topology.ranks} GPUs without a sample")
        return ", ".join(parts)


def memory(drawn: MemoryPlan) -> str:
    """GiB of a GPU and of a host, for people; a host that is not known is a condition."""
    host, hosts = gib(drawn.estimate.host_peak), drawn.hardware.host_memory
    on_host = f"{host} GiB of {gib(hosts)} a host" if hosts else f"if a host has {host} GiB"
    if drawn.topology.device == "cpu":
        return on_host
    device, there = gib(drawn.margins.of(drawn.estimate.peak)), drawn.hardware.device_memory
    on_device = f"{device} GiB of {gib(there)} a GPU" if there else f"{device} GiB a GPU"
    return f"{on_device}, {on_host}"


def _time(drawn: MemoryPlan) -> Iterator[str]:
    time = drawn.time
    if time.parts:
        unknown = f"; {' and '.join(time.unknown)} not known" if time.unknown else ""
        yield f"a step of about {seconds(drawn):.3g} s, bound by {time.bound}{unknown}"


def choose(
    base: Base, strategies: Sequence[Strategy], slot: str
) -> tuple[list[Candidate], list[str]]:
    """Every strategy that was tried, the best first if it fits, and those that cannot be tried, and
    why. One that offloads is tried only where none before it fits. Raises StageError for a model of
    which nothing can be told."""
    tried: list[Candidate] = []
    refused = []
    for _, tier in groupby(strategies, key=lambda one: max(one.order, Tier.OFFLOADED - 1)):
        for strategy in tier:
            try:
                found = ways(base, wrapped(strategy, slot))
            except (RecipeError, UsageError) as error:
                refused.append(f"{strategy.name}: {error}")
            else:
                tried.append(Candidate(strategy=strategy, way=best(found) or found[0]))
        way = best([one.way for one in tried])
        if way is not None:
            return sorted(tried, key=lambda one: (one.way is not way, not one.way.fits)), refused
    return tried, refused


def on_more_nodes(base: Base, topology: Topology, start: Changes) -> tuple[Asked, Way] | None:
    """The fewest nodes, doubling, on which it fits with these changes, with nothing changed of what
    is computed, and with a sample for each rank. None if it does not on MOST_NODES, or cannot be
    planned there."""
    nodes = topology.nodes
    while (nodes := nodes * 2) <= MOST_NODES:
        asked = replace(base.asked, nodes=nodes, gpus=topology.local_ranks)
        try:
            found = best(ways(replace(base, asked=asked), start, narrow=False))
        except PipeError:  # such as a batch that is smaller than the ranks
            return None
        if found is not None and not found.drawn.idle:
            return asked, found
    return None


def suited(strategies: Sequence[Strategy], topology: Topology) -> Iterator[Strategy]:
    """The strategies that are not another one under a second name there."""
    several = 1 < topology.nodes < topology.ranks
    for strategy in strategies:
        if strategy.order >= Tier.OFFLOADED:
            differs = topology.device != "cpu"
        elif strategy.order == Tier.SHARDED_WITHIN_NODES:
            differs = several
        else:
            differs = strategy.order == Tier.REPLICATED or topology.ranks > 1
        if differs:
            yield strategy


def wrapped(strategy: Strategy, slot: str) -> Changes:
    """The slot that wraps the model."""
    return {slot: strategy.generous}

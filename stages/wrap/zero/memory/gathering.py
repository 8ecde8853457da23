"""Which parameters stage 3 holds whole, from fetch to release.

A model of DeepSpeed's PartitionedParameterCoordinator once it knows the order of modules, which is
from the third forward pass on. Prefetching is no window: every module's fetch asks for another
`prefetch_bucket_size` elements, until `max_live_parameters` are whole.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from stages.wrap.zero.memory.terms import Place, Setting, Weights

PREFETCH, LIVE, REUSE, PERSIST = 50_000_000, 1_000_000_000, 1_000_000_000, 100_000
"""DeepSpeed's defaults (zero/config.py)."""
BARE = 4
"""Modules of a block without parameters of their own: the block, attention, MLP, activation. Each
is a fetch, and so lets another prefetch begin."""

Spot = tuple[bool, Place]
"""Whether it is in the forward pass, and where."""


@dataclass
class _Call:
    spot: Spot
    parameters: tuple[int, ...]


@dataclass
class _Gather:
    """Parameters gathered in one collective: one by itself in its own memory, several in a common
    buffer, from which they are copied when the first is waited for."""

    parameters: tuple[int, ...]
    waiting: set[int]
    copied: bool = False


@dataclass
class Gathering:
    """The coordinator; sizes in elements."""

    sizes: list[int]
    calls: list[_Call]
    prefetch: int
    live: int
    reuse: int
    persist: int
    world: int
    staged: bool
    """Parts come from the host, through memory of the device."""
    whole: set[int] = field(default_factory=set)
    flights: dict[int, _Gather] = field(default_factory=dict)
    buffers: list[_Gather] = field(default_factory=list)
    fetched_for: dict[int, int] = field(default_factory=dict)
    counted: int = 0
    most: dict[Spot, int] = field(default_factory=dict)
    """That are whole at most, in buffers and parameters."""
    moved: int = 0
    """That were gathered, with padding."""

    def run(self) -> None:
        """Forward and backward."""
        self.whole = {n for n, size in enumerate(self.sizes) if size <= self.persist}
        queue = deque((p, n) for n, call in enumerate(self.calls) for p in sorted(call.parameters))
        for step, call in enumerate(self.calls):
            self._fetch(step, call, queue)
            self._release(step + 1, call)

    def _fetch(self, step: int, call: _Call, queue: deque[tuple[int, int]]) -> None:
        self._gather([p for p in call.parameters if not self._has(p)], call.spot)
        for parameter in call.parameters:
            self._wait(parameter, call.spot)
        fresh = {p for p in call.parameters if self.fetched_for.get(p, -1) < step}
        taken: set[int] = set()
        while queue and len(taken) < len(fresh):
            parameter, self.fetched_for[parameter] = queue.popleft()
            taken.add(parameter)
        self._gather(self._ahead(queue), call.spot)
        self._note(call.spot)

    def _ahead(self, queue: deque[tuple[int, int]]) -> list[int]:
        wanted: list[int] = []
        room = min(self.live - self.counted, self.prefetch)
        while queue and sum(self.sizes[p] for p in wanted) < room:
            parameter, use = queue.popleft()
            self.fetched_for[parameter] = max(self.fetched_for.get(parameter, -1), use)
            if not self._has(parameter) and parameter not in wanted:
                wanted.append(parameter)
        return wanted

    def _has(self, parameter: int) -> bool:
        return parameter in self.whole or parameter in self.flights

    def _gather(self, parameters: list[int], spot: Spot) -> None:
        if not parameters:
            return
        gather = _Gather(tuple(parameters), set(parameters))
        self.counted += sum(self.sizes[p] for p in parameters)
        self.moved += sum(map(self._padded, parameters))
        self.flights |= dict.fromkeys(parameters, gather)
        self.buffers.append(gather)
        if self.staged:
            self._note(spot, more=sum(map(self._padded, parameters)) // self.world)

    def _wait(self, parameter: int, spot: Spot) -> None:
        gather = self.flights.pop(parameter, None)
        if gather is None:
            return
        if len(gather.parameters) == 1:  # it is where it was received
            self.buffers.remove(gather)
        if not gather.copied:
            gather.copied = True
            self.whole.update(gather.parameters)
        self._note(spot)
        gather.waiting.discard(parameter)
        if not gather.waiting and gather in self.buffers:
            self.buffers.remove(gather)

    def _note(self, spot: Spot, more: int = 0) -> None:
        buffers = sum(self._padded(p) for one in self.buffers for p in one.parameters)
        if self.world == 1:  # nothing is received, copies from the host are the parameters
            buffers = more = 0
        held = buffers + sum(self.sizes[p] for p in self.whole) + more
        self.most[spot] = max(self.most.get(spot, 0), held)

    def _padded(self, parameter: int) -> int:
        return -(-self.sizes[parameter] // self.world) * self.world

    def _release(self, step: int, call: _Call) -> None:
        kept = {p for p in call.parameters if self.sizes[p] <= self.persist}
        kept |= {p for p in call.parameters if self.fetched_for.get(p, -1) > step}
        passed = 0
        for later in self.calls[step:]:
            if passed >= self.reuse:
                break
            kept.update(later.parameters)
            passed += sum(self.sizes[p] for p in later.parameters)
        for parameter in set(call.parameters) - kept:
            if parameter in self.whole and parameter not in self.flights:
                self.whole.discard(parameter)
                self.counted -= self.sizes[parameter]


def gathered(setting: Setting, weights: Weights) -> Mapping[Spot, int]:
    """Elements held whole at most, by spot; with one rank a parameter is its own part."""
    if setting.world == 1 and setting.stage.offload_param is None:
        return {}
    return _run(setting, weights).most


def gathers(setting: Setting, weights: Weights, microbatches: int) -> int:
    """Elements that an optimizer step of so many micro-batches gathers, with padding: small ones,
    which stay whole, after the update alone."""
    limit, world = persistence(setting), setting.world
    small = (one.elements for one in weights.all if one.elements <= limit)
    updated = sum(setting.share(elements) * world for elements in small)
    return _run(setting, weights).moved * microbatches + updated


def _run(setting: Setting, weights: Weights) -> Gathering:
    stage = setting.stage
    return _gathering(
        weights,
        PREFETCH if stage.prefetch_bucket_size is None else stage.prefetch_bucket_size,
        LIVE if stage.max_live_parameters is None else stage.max_live_parameters,
        REUSE if stage.max_reuse_distance is None else stage.max_reuse_distance,
        persistence(setting),
        setting.world,
        stage.offload_param is not None,
    )


@functools.cache
def _gathering(
    weights: Weights, prefetch: int, live: int, reuse: int, persist: int, world: int, staged: bool
) -> Gathering:
    calls = _forward(weights)
    backward = [_Call((False, call.spot[1]), call.parameters) for call in reversed(calls)]
    sizes = [weight.elements for weight in weights.all]
    done = Gathering(sizes, calls + backward, prefetch, live, reuse, persist, world, staged)
    done.run()
    return done


def persistence(setting: Setting) -> int:
    """Parameters of so many elements and fewer stay whole."""
    threshold = setting.stage.param_persistence_threshold
    return PERSIST if threshold is None else threshold


def _forward(weights: Weights) -> list[_Call]:
    before: Spot = (True, "embeddings")
    after: Spot = (True, "head")
    calls = [_Call(before, ()), _Call(before, ()), _Call(before, (0,)), _Call(before, ())]
    number = 1
    for index, block in enumerate(weights.blocks):
        calls += [_Call((True, index), ()) for _ in range(BARE)]
        calls += [_Call((True, index), (number + offset,)) for offset in range(len(block))]
        number += len(block)
    calls += [_Call(after, (number + offset,)) for offset in range(len(weights.root) - 1)]
    return calls + [_Call(after, (0,))] * weights.tied

"""The order in which ranks of a pipeline take their passes, and how long they wait: for plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipeline.planning import Kind, Pass
from stages.wrap.axes import least_microbatches

TIMES: dict[Kind, int] = {"forward": 1, "backward": 2, "inputs": 1, "weights": 1}
"""Time of a pass, in that of a forward: backward has twice the products."""


class GlobalPass(NamedTuple):
    """A pass, and the number of its stage among those of all ranks."""

    local: Pass
    stage: int


Orders = Sequence[Sequence[GlobalPass]]
"""The passes of each rank."""


def passes_of(schedule: str, ranks: int, per_rank: int, count: int) -> tuple[int, Orders]:
    """Number of micro-batches of a step of `count` ones, which a schedule may round up, and the
    passes of each rank."""
    count = least_microbatches(schedule, ranks, count)
    if schedule == "GPipe":
        return count, [[*_numbered(rank, _breadth_first(count))] for rank in range(ranks)]
    if schedule == "1F1B":
        return count, [[*_numbered(rank, _by_turns(count, ranks - rank))] for rank in range(ranks)]
    from stages.wrap.pipeline.compat import orders

    return count, [
        [GlobalPass(Pass(kind, local, batch), stage) for kind, local, stage, batch in passes]
        for passes in orders(schedule, ranks, per_rank, count)
    ]


def _numbered(rank: int, passes: Iterator[tuple[Kind, int]]) -> Iterator[GlobalPass]:
    for kind, batch in passes:
        yield GlobalPass(Pass(kind, 0, batch), rank)
    yield GlobalPass(Pass("reduce", 0), rank)


def _breadth_first(count: int) -> Iterator[tuple[Kind, int]]:
    for batch in range(count):
        yield "forward", batch
    for batch in range(count):
        yield "backward", batch


def _by_turns(count: int, ahead: int) -> Iterator[tuple[Kind, int]]:
    """Forward of `ahead` micro-batches, then a backward and a forward in turn."""
    ahead = min(ahead, count)
    for batch in range(ahead):
        yield "forward", batch
    for batch in range(count):
        yield "backward", batch
        if batch + ahead < count:
            yield "forward", batch + ahead


def idle_shares(orders: Orders, stages: int) -> list[float]:
    """Share of a step in which each rank waits, if all stages take the same time and sending takes
    none."""
    over: dict[tuple[str, int, int], int] = {}
    clocks, places = [0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                (kind, _, batch), stage = order[places[rank]]
                ready = _ready(over, kind, stage, batch, stages)
                if ready is None:
                    break
                if kind in TIMES:
                    clocks[rank] = max(clocks[rank], ready) + TIMES[kind]
                    done = "weights" if kind == "weights" else _direction(kind)
                    over[done, stage, batch] = clocks[rank]
                places[rank] += 1
                moved = True
    span = max(clocks)
    busy = [sum(TIMES.get(one.local.kind, 0) for one in order) for order in orders]
    return [1 - one / span for one in busy]


def _direction(kind: Kind) -> str:
    return "forward" if kind == "forward" else "backward"


def _ready(
    over: dict[tuple[str, int, int], int], kind: Kind, stage: int, batch: int, stages: int
) -> int | None:
    """Time from which a pass can begin; None before what it needs has begun."""
    if kind == "forward":
        return 0 if stage == 0 else over.get(("forward", stage - 1, batch))
    if kind in ("backward", "inputs"):
        if stage == stages - 1:
            return over.get(("forward", stage, batch))
        return over.get(("backward", stage + 1, batch))
    return 0

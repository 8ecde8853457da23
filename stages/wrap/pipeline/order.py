"""The order in which ranks of a pipeline take their passes, and how long they wait: for plans."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
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
    if schedule in ("GPipe", "1F1B"):
        ahead = [count if schedule == "GPipe" else ranks - rank for rank in range(ranks)]
        return count, [[*_by_turns(rank, count, most)] for rank, most in enumerate(ahead)]
    from stages.wrap.pipeline.compat import orders

    return count, [
        [GlobalPass(Pass(kind, local, batch), stage) for kind, local, stage, batch in passes]
        for passes in orders(schedule, ranks, per_rank, count)
    ]


def _by_turns(rank: int, count: int, ahead: int) -> Iterator[GlobalPass]:
    """Forward of `ahead` micro-batches, then a backward and a forward in turn."""
    for batch in range(-ahead, count):
        if batch >= 0:
            yield GlobalPass(Pass("backward", 0, batch), rank)
        if batch + ahead < count:
            yield GlobalPass(Pass("forward", 0, batch + ahead), rank)
    yield GlobalPass(Pass("reduce", 0), rank)


def idle_shares(orders: Orders, stages: int) -> list[float]:
    """Share of a step in which each rank waits, if all stages take the same time and sending takes
    none."""
    over: dict[tuple[str, int, int], int] = {}
    clocks = [0] * len(orders)
    left = [deque(one for one in order if one.local.kind in TIMES) for order in orders]
    while any(left):
        for rank, order in enumerate(left):
            while order and (ready := _ready(over, order[0], stages)) is not None:
                (kind, _, batch, _), stage = order.popleft()
                clocks[rank] = max(clocks[rank], ready) + TIMES[kind]
                over["backward" if kind == "inputs" else kind, stage, batch] = clocks[rank]
    busy = [sum(TIMES.get(one.local.kind, 0) for one in order) for order in orders]
    return [1 - one / max(clocks) for one in busy]


def _ready(over: Mapping[tuple[str, int, int], int], one: GlobalPass, stages: int) -> int | None:
    """Time from which a pass can begin; None before what it needs has ended."""
    (kind, _, batch, _), stage = one
    if kind == "forward":
        return 0 if stage == 0 else over.get(("forward", stage - 1, batch))
    if kind == "weights":
        return 0
    if stage == stages - 1:
        return over.get(("forward", stage, batch))
    return over.get(("backward", stage + 1, batch))

"""Private parts of torch's pipeline schedules."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.pipelining.schedules import get_schedule_class

from stages.wrap.torch_compat import sum_in_reduce_dtype

BACKWARD = {"SEND_B", "RECV_B", "I", "W", "B", "BW", "REDUCE_GRAD"}
"""Actions of a schedule that take part in backward only."""
KINDS = {
    "F": "forward", "B": "backward", "I": "inputs", "W": "weights", "UNSHARD": "gather",
    "RESHARD": "release", "REDUCE_GRAD": "reduce",
}  # fmt: skip
"""Actions of torch's schedules other than communication between stages."""


@contextlib.contextmanager
def forward_only(schedule: Any) -> Iterator[None]:
    """Leave actions of backward out of a schedule of several stages a rank in the body.

    `eval` of torch 2.13 runs them as if they did nothing, which fails where two neighbouring stages
    are on one rank.
    """
    whole = getattr(schedule, "pipeline_order_with_comms", None)
    if whole is None:
        yield
        return
    schedule.pipeline_order_with_comms = {
        rank: [
            part
            for action in actions
            for part in action.sub_actions or (action,)
            if part.computation_type.value not in BACKWARD
        ]
        for rank, actions in whole.items()
    }
    try:
        yield
    finally:
        schedule.pipeline_order_with_comms = whole


def adapt(stage: Any, numbered: Any) -> None:
    """Number the micro-batches that pass a stage of torch (`numbered.number`), and mend two faults
    of torch 2.13 where backward runs in two halves.

    The half for inputs keeps their gradients until the next step, which takes as much memory as all
    that was received. The half for weights is hidden from FSDP, so that gradients of several
    micro-batches might be summed in the compute dtype.
    """
    # No cycle of references: the buffers of a stage go with the last one.
    kind, alive = type(stage), weakref.ref(stage)

    def forward_one_chunk(chunk: int, *args: Any, **kwargs: Any) -> Any:
        numbered.number = chunk
        return kind.forward_one_chunk(alive(), chunk, *args, **kwargs)

    def backward_one_chunk(chunk: int, *args: Any, **kwargs: Any) -> None:
        stage: Any = alive()
        _, inputs = stage.fwd_cache[chunk]
        kind.backward_one_chunk(stage, chunk, *args, **kwargs)
        for one in inputs:
            one.grad = None

    def backward_weight_one_chunk(chunk: int, *args: Any, **kwargs: Any) -> None:
        stage: Any = alive()
        kind.backward_weight_one_chunk(stage, chunk, *args, **kwargs)
        sum_in_reduce_dtype(stage.submod)

    stage.forward_one_chunk = forward_one_chunk
    stage.backward_one_chunk = backward_one_chunk
    stage.backward_weight_one_chunk = backward_weight_one_chunk


def orders(
    schedule: str, ranks: int, per_rank: int, count: int
) -> list[list[tuple[Any, int, int, int]]]:
    """The passes of each rank under a schedule of several stages a rank: kind, number of the stage
    on its rank and among all, micro-batch."""
    stages = [
        SimpleNamespace(
            num_stages=ranks * per_rank, group_size=ranks, group_rank=0, stage_index=ranks * number,
            submod=nn.Module(), has_backward=True, is_last=False,
        )
        for number in range(per_rank)
    ]  # fmt: skip
    made: Any = get_schedule_class(schedule)(stages, count)
    # The first stage has no gradients of inputs: torch skips that half there, and runs all of
    # backward as the half for weights.
    of_first = {**KINDS, "I": "", "W": "backward"}
    found = []
    for rank in range(ranks):
        rows = [
            (kind, one.stage_index, one.microbatch_index or 0)
            for one in made.pipeline_order_with_comms[rank]
            if (kind := (KINDS if one.stage_index else of_first).get(one.computation_type.value))
        ]
        numbers = sorted({stage for _, stage, _ in rows})
        found.append([(kind, numbers.index(stage), stage, batch) for kind, stage, batch in rows])
    return found

"""Private parts of torch's pipeline schedules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

BACKWARD = {"SEND_B", "RECV_B", "I", "W", "B", "BW", "REDUCE_GRAD"}
"""Actions of a schedule that take part in backward alone."""


@contextlib.contextmanager
def forward_alone(schedule: Any) -> Iterator[None]:
    """Leave actions of backward out of a schedule of several stages a rank in the body.

    `eval` of torch 2.13 runs them as if they did nothing, which fails where two neighbouring stages
    are on one rank.
    """
    whole = getattr(schedule, "pipeline_order_with_comms", None)
    if whole is None:
        yield
        return
    schedule.pipeline_order_with_comms = {
        rank: [one for action in actions for one in _forward_part(action)]
        for rank, actions in whole.items()
    }
    try:
        yield
    finally:
        schedule.pipeline_order_with_comms = whole


def _forward_part(action: Any) -> list[Any]:
    """The action, what it consists of, or nothing."""
    parts = action.sub_actions or (action,)
    return [part for part in parts if part.computation_type.value not in BACKWARD]

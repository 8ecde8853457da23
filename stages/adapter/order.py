"""Does a change of the model come in time?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.engine import Engine
from pipeline.errors import Problem
from pipeline.signature import gives
from pipeline.stage import PlanView


def too_late(stage: Any, plan: PlanView) -> Iterator[Problem]:
    """A slot before that of `stage` has built the model already."""
    for slot, other in plan.slots.items():
        if other is stage:
            return
        given = gives(type(other))
        if given is not None and issubclass(given, Engine):
            yield Problem(
                message=f"comes behind slot `{slot}`, which builds the model, and would change "
                "nothing",
                hint="move it up, behind the model slot",
            )

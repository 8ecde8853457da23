"""Slots of a recipe that run in this process, without a run."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.contracts.metrics import Metrics
from pipeline.contracts.stage import Context

if TYPE_CHECKING:
    from pipeline.chain.plan import Plan, PlannedSlot


@contextlib.contextmanager
def scratch_context(
    log: logging.Logger, *, seed: int = 0, device: str = "cpu"
) -> Iterator[Context]:
    """Yield the context of stages that run here, with a run folder that is removed afterwards."""
    import torch

    from pipeline.distributed.process_group import DistContext

    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="pipe-show-"))
        yield Context(
            run_dir=Path(scratch),
            seed=seed,
            dist=DistContext(device=torch.device(device)),
            log=log,
            metrics=Metrics(None),
            on_exit=stack.callback,
        )


def artifact(plan: Plan, planned: PlannedSlot, ctx: Context, made: dict[str, Any]) -> Any:
    """Return the artifact of a slot. It runs, after the slots that it needs, unless their artifacts
    have been `made`."""
    if planned.slot not in made:
        slots = {each.slot: each for each in plan.slots}
        inputs = {
            name: slot and artifact(plan, slots[slot], ctx, made)
            for name, slot in planned.inputs.items()
        }
        made[planned.slot] = planned.stage.run(
            dataclasses.replace(ctx, slot=planned.slot), **inputs
        )
    return made[planned.slot]

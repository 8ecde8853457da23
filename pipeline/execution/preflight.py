"""Checks before the first training step: resource needs of the rest of the run, and the dry run."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pipeline.chain.artifacts import Inputs, Results, training_of
from pipeline.contracts.metrics import Metrics
from pipeline.contracts.model import ModelSource
from pipeline.contracts.resources import require_resources
from pipeline.contracts.signature import needs
from pipeline.contracts.stage import NeedsResources, RunsDry
from pipeline.contracts.training import Checkpoints, Progress, TrainedRun
from pipeline.utils.files import remove_folder

if TYPE_CHECKING:
    from pipeline.chain.plan import Plan, PlannedSlot
    from pipeline.contracts.resources import ResourceNeed
    from pipeline.contracts.stage import Context

Artifacts = Mapping[str, Any]
"""Artifacts by slot."""


def look_ahead(plan: Plan, ctx: Context, artifacts: Artifacts, slots: frozenset[str]) -> None:
    """Ask the stages of `slots` for the resources that they will need; raise StageError if some are
    missing. Only rank 0 asks: its machine also writes the exports."""
    if not ctx.dist.is_main:
        return
    needs: list[ResourceNeed] = []
    known = _in_order(plan, artifacts)
    for planned in plan.slots:
        asked = planned.slot in slots and isinstance(planned.stage, NeedsResources)
        inputs = _so_far(planned, artifacts) if asked else {}
        if asked and not known.missing(planned.stage, "resource_needs", inputs):
            needs += known.call(planned.stage, "resource_needs", _own(plan, planned, ctx), inputs)
    require_resources(needs)


def run_dry(plan: Plan, ctx: Context, artifacts: Artifacts) -> None:
    """Save the engine's state and have every stage with `run_dry`, up to the next training, work on
    that checkpoint (collective). Everything written is removed again, unless it fails; random
    states stay unchanged."""
    from pipeline.checkpoint import rng_state

    folder, device = ctx.run_dir / f"{ctx.run_dir.name}.dry-run", ctx.dist.device
    ctx.log.info("dry run: saving, consolidating and exporting the untrained model")
    began = time.monotonic()
    removals: list[Callable[[], object]] = []
    with contextlib.ExitStack() as stack:
        stack.callback(rng_state.apply, rng_state.capture(device), device)
        if ctx.dist.is_main:
            remove_folder(folder)
            folder.mkdir()
            removals.append(lambda: remove_folder(folder))
        ctx.dist.barrier()
        stage_ctx = dataclasses.replace(
            ctx, run_dir=folder, metrics=Metrics(None), on_exit=removals.append
        )
        _run_stages(plan, stage_ctx, dict(artifacts), stack)
    # After a failure everything stays, to be looked at, until the next dry run.
    ctx.dist.barrier()
    for remove in reversed(removals):
        remove()
    ctx.dist.barrier()
    ctx.log.info("dry run: passed in %.1f s; all of it is removed", time.monotonic() - began)


def _run_stages(
    plan: Plan, ctx: Context, artifacts: dict[str, Any], stack: contextlib.ExitStack
) -> None:
    checkpoints: Checkpoints | None = None
    saved = False
    for planned in plan.slots:
        of_another = training_of(plan.view.wiring, planned.slot) != ctx.training
        if planned.gives is not None and issubclass(planned.gives, TrainedRun):
            if of_another and not saved:
                continue
            if of_another or checkpoints is None:
                return
            checkpoints.save(Progress())
            saved = True
            artifacts[planned.slot] = TrainedRun(
                checkpoint=checkpoints.finish(), progress=Progress()
            )
            continue
        known = _in_order(plan, artifacts)
        dry = isinstance(planned.stage, RunsDry) and not of_another
        if not dry or known.missing(planned.stage, "run_dry", planned.inputs):
            continue
        ctx.log.info("dry run: %s: %s", planned.slot, planned.use)
        made = known.call(planned.stage, "run_dry", _own(plan, planned, ctx), planned.inputs)
        artifacts[planned.slot] = made
        checkpoints = made if isinstance(made, Checkpoints) else checkpoints
        stack.callback(getattr(made, "close", lambda: None))


def _in_order(plan: Plan, artifacts: Artifacts) -> Results:
    """Artifacts in the order of slots: restored ones may have come first."""
    return Results({one.slot: artifacts[one.slot] for one in plan.slots if one.slot in artifacts})


def _so_far(planned: PlannedSlot, artifacts: Artifacts) -> Inputs:
    """The inputs of a slot, without a model that a training before it is still to make: what the
    latest one needs, it will need, too."""
    stage: type = type(planned.stage)
    kinds = {need.parameter: need.type for need in needs(stage)}
    return {
        parameter: slot for parameter, slot in planned.inputs.items()
        if slot in artifacts or not issubclass(ModelSource, kinds[parameter])
    }  # fmt: skip


def _own(plan: Plan, planned: PlannedSlot, ctx: Context) -> Context:
    training = training_of(plan.view.wiring, planned.slot)
    return dataclasses.replace(ctx, slot=planned.slot, training=training)

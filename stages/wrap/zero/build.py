"""From a recipe's wrap.zero slot to a running engine."""

from __future__ import annotations

import contextlib
import functools
import json
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from pipeline.artifacts import ModelSource, OptimizerPlan, Precision
from pipeline.errors import StageError
from pipeline.files import replace_text
from pipeline.stage import Context
from stages.wrap.birth import cast_buffers, expected_buffers
from stages.wrap.fill import fill
from stages.wrap.witness import attest
from stages.wrap.zero import compat
from stages.wrap.zero.birth import partitioned, replicated
from stages.wrap.zero.config import generate
from stages.wrap.zero.engine import ZeroEngine
from stages.wrap.zero.optimizer import make_optimizer

if TYPE_CHECKING:
    from stages.wrap.zero.stage import Zero


def build(
    stage: Zero, ctx: Context, model: ModelSource, precision: Precision, plan: OptimizerPlan
) -> ZeroEngine:
    """Give birth to the parameters, hand them to DeepSpeed, and say what came of it."""
    config = generate(stage, precision, max_grad_norm=plan.max_grad_norm)
    if ctx.dist.is_main:
        replace_text(ctx.run_dir / "deepspeed.json", json.dumps(config, indent=1) + "\n")
    compat.start(ctx.dist, ctx.log)
    if precision.compute == "fp16" and not compat.computes_fp16():
        raise StageError(
            "DeepSpeed refuses fp16 on this device, which has no fp16 arithmetic",
            hint="set compute: bf16 in the precision slot",
        )
    with contextlib.closing(model.weights()) as reader:  # which tells what does not fit
        if stage.stage == 3:
            module = partitioned(model, precision, ctx.dist, config)
        else:
            module = replicated(model, precision, ctx.dist)
        cast_buffers(module, precision)
        with compat.quiet(ctx.log):
            live = _initialize(stage, module, plan, config)
        engine = ZeroEngine(live, ctx.dist, precision, plan)
        # Weakly, so that the engine's memory can be freed before the run ends.
        ctx.on_exit(functools.partial(_close, weakref.ref(engine)))
        # Masters, not parameters: those that DeepSpeed makes of parameters lack what the compute
        # dtype rounds off.
        fill(engine.weights(), reader, ctx)
        engine.refresh()
    attest(ctx, engine, _expected(stage, ctx, precision, plan))
    return engine


def _initialize(
    stage: Zero, module: nn.Module, plan: OptimizerPlan, config: Mapping[str, Any]
) -> Any:
    import deepspeed

    live, *_ = deepspeed.initialize(
        model=module,
        optimizer=make_optimizer(stage, plan, module),
        config=dict(config),
        dist_init_required=False,
    )
    return live


def _close(engine: weakref.ref[ZeroEngine]) -> None:
    live = engine()
    if live is not None:
        live.close()


def _expected(
    stage: Zero, ctx: Context, precision: Precision, plan: OptimizerPlan
) -> dict[str, Any]:
    """What `facts()` must say for the recipe to be what runs."""
    optimizer, parameters = stage.offload_optimizer, stage.offload_param
    return {
        "engine": "DeepSpeedEngine",
        "zero_stage": stage.stage,
        "world_size": ctx.dist.world_size,
        "device": ctx.dist.device.type,
        "master": [precision.master],
        "compute": [precision.compute],
        "reduce": precision.reduce,
        **expected_buffers(precision),
        "offload_optimizer": optimizer.device if optimizer else None,
        "offload_param": parameters.device if parameters else None,
        "max_grad_norm": plan.max_grad_norm,
        "accumulation": "unmanaged",
        "loss_scaling": precision.loss_scaling is not None,
        "partitioned": True,
    }

"""From a recipe's wrap.zero slot to a running engine."""

from __future__ import annotations

import contextlib
import functools
import json
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import nn

from pipeline.contracts.model import ModelSource
from pipeline.contracts.optimizer import NamedParameter, OptimizerPlan
from pipeline.contracts.precision import Precision
from pipeline.contracts.stage import Context
from pipeline.distributed.process_group import DistContext
from pipeline.errors import StageError
from pipeline.utils.files import replace_text
from stages.wrap.load_weights import load_weights
from stages.wrap.materialize import build_empty, cast_buffers, expected_buffers, materialize
from stages.wrap.verify_engine import verify_engine
from stages.wrap.zero import compat
from stages.wrap.zero.config import generate
from stages.wrap.zero.engine import ZeroEngine
from stages.wrap.zero.stage import RULE, uses_deepspeed_kernel

if TYPE_CHECKING:
    from torch.optim import Optimizer

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
        load_weights(engine.weights(), reader, ctx)
        engine.sync_compute_weights()
    verify_engine(ctx, engine, _expected(stage, ctx, precision, plan))
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


def replicated(model: ModelSource, precision: Precision, dist: DistContext) -> nn.Module:
    """Stages 1 and 2: every rank has memory for all parameters, not yet filled."""
    module = build_empty(model, precision)
    materialize(module, dist.device, buffer_device=dist.device)
    return module


def partitioned(
    model: ModelSource, precision: Precision, dist: DistContext, config: Mapping[str, Any]
) -> nn.Module:
    """Stage 3: each parameter is partitioned as soon as it exists, not yet filled.

    No process holds more of the model than its part and one whole tensor.
    """
    import deepspeed

    declared = build_empty(model, precision)
    with deepspeed.zero.Init(config_dict_or_path=dict(config)):
        module = model.build()
    model.tie(module)
    for owner in model.external_parameter_modules(module):
        for parameter in owner.parameters():
            deepspeed.zero.register_external_parameter(owner, parameter)
    for block in model.compiled_modules(module):
        # Gathered as a whole, without hooks within, which would break its graph. Frozen parameters
        # are not there in backward then: with an adapter the hooks stay.
        if all(parameter.requires_grad for parameter in block.parameters()):
            deepspeed.utils.set_z3_leaf_module(block, True)
    module.train()
    _redeclare_buffers(module, declared, dist.device)
    return module


def _redeclare_buffers(module: nn.Module, declared: nn.Module, device: torch.device) -> None:
    """Give `module` the buffers of `declared`: zero.Init computes buffers in the parameters' dtype,
    which is too coarse for rotary frequencies."""
    for name, buffer in declared.named_buffers(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._buffers[leaf] = buffer.to(device)


def make_optimizer(stage: Zero, plan: OptimizerPlan, module: nn.Module) -> Optimizer:
    """The optimizer over the module's parameters, before DeepSpeed takes it apart.

    Raises StageError when DeepSpeed's kernel was asked for by name and has no such rule.
    """
    groups = plan.groups(_named_parameters(module))
    if not uses_deepspeed_kernel(stage, plan.algorithm):
        return plan.build(groups)
    if plan.algorithm != RULE:
        raise StageError(
            f"DeepSpeed's kernels compute {RULE}, the optimizer slot asks for {plan.algorithm}",
            hint="set optimizer_implementation: torch",
        )
    return _adamw(groups, plan, offloaded=stage.offload_optimizer is not None)


def _adamw(groups: list[dict[str, Any]], plan: OptimizerPlan, *, offloaded: bool) -> Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    if offloaded:
        optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True, **plan.hyperparameters)
    else:
        optimizer = FusedAdam(groups, adam_w_mode=True, **plan.hyperparameters)
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def _named_parameters(module: nn.Module) -> list[NamedParameter]:
    """Parameters with their full shapes, which a partitioned one keeps in `ds_shape`; every rank
    has masters of its own."""
    shard = torch.distributed.get_rank()
    return [
        NamedParameter(
            name, parameter, tuple(getattr(parameter, "ds_shape", parameter.shape)), shard
        )
        for name, parameter in module.named_parameters()
    ]

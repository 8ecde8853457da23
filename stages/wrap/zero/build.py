"""The way from a recipe's wrap.zero slot to a running engine."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import nn

from pipeline import (
    Context,
    Engine,
    ModelSource,
    OptimizerPlan,
    Precision,
    StageError,
    torch_dtype,
)
from pipeline.utils import replace_text
from stages.wrap.axes import Axes, required
from stages.wrap.build import (
    build_empty,
    cast_buffers,
    declared_facts,
    materialize,
    named_parameters,
    verify_engine,
)
from stages.wrap.context.attention import divide_sequence
from stages.wrap.load_weights import load_weights
from stages.wrap.optimizer_groups import groups_of
from stages.wrap.optimizer_state import require_zeros
from stages.wrap.passes import ModulePasses
from stages.wrap.tensor.placements import is_divided, replace_parameters, whole_of
from stages.wrap.zero import compat
from stages.wrap.zero.checks import rule_problems
from stages.wrap.zero.config import generate
from stages.wrap.zero.engine import ZeroEngine
from stages.wrap.zero.stage import uses_cpu_adam
from stages.wrap.zero.tensor_parallel import ZeroDivider

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from stages.wrap.zero.stage import Zero


def build(
    stage: Zero, ctx: Context, model: ModelSource, precision: Precision, plan: OptimizerPlan
) -> Engine:
    """Create the parameters, initialise DeepSpeed, load its master weights, verify the engine."""
    if not plan.parts:
        from stages.wrap.zero.frozen import build_frozen

        return build_frozen(stage, ctx, model, precision, plan)
    # An optimizer stage of another package may not say its rules to `pipe check`.
    for problem in rule_problems(stage, precision.master, plan.rules):
        raise StageError(f"{problem.key}: {problem.message}", hint=problem.hint)
    config = generate(stage, precision, max_grad_norm=plan.max_grad_norm)
    if ctx.dist.is_main:
        replace_text(ctx.run_dir / "deepspeed.json", json.dumps(config, indent=1) + "\n")
    compat.start(ctx.dist, ctx.log)
    axes = required(stage, ctx.dist.world_size)
    import deepspeed

    # Opened first: this compares the weights with the model.
    with contextlib.closing(model.weights()) as reader:
        divider = ZeroDivider(stage, ctx, axes) if axes.tensor > 1 else None
        module = make_module(stage, ctx, model, precision, config, divider)
        group = divide_sequence(module, axes, ctx.dist.device.type)
        if ctx.dist.device.type == "cuda" and (large := beyond_bucket(stage, module)):
            ctx.log.warning(BEYOND_BUCKET, *large)
        with compat.quiet():
            live, *_ = deepspeed.initialize(
                model=module,
                optimizer=_optimizer(stage, plan, module),
                config=dict(config),
                dist_init_required=False,
                mpu=None if divider is None else divider.groups,
            )
        compat.lift_loss_scale_floor(live)
        passes = ModulePasses(live.module, model.scorer(live, group=group), ctx.dist, axes)
        engine = ZeroEngine(live, passes, precision, plan)
        close_at_exit(ctx, engine)
        # Load masters and make parameters from them: masters that DeepSpeed makes from
        # parameters have lost what the compute dtype rounds off.
        load_weights(engine.master_shards(), reader, ctx)
        engine.sync_compute_weights()
    verify_engine(ctx, engine, _expected(stage, ctx, precision, plan))
    return engine


BEYOND_BUCKET = (
    "overlap_comm: the gradient of %s is larger than reduce_bucket_size, and DeepSpeed may use its "
    "memory again before it is sent; set reduce_bucket_size: %d"
)


def beyond_bucket(stage: Zero, module: nn.Module) -> tuple[str, int] | None:
    """Name and elements of the largest gradient that stage 2 would reduce outside of its bucket
    while backward goes on.

    DeepSpeed 0.19 reduces it on another stream and frees it, without telling the allocator of that
    stream, on ranks that hold no part of it (`average_tensor`, `clear_grad_attribute`)."""
    if not stage.overlap_comm or stage.stage != 2 or stage.offload_optimizer is not None:
        return None
    trained = ((name, one.numel()) for name, one in module.named_parameters() if one.requires_grad)
    name, most = max(trained, key=lambda pair: pair[1], default=("", 0))
    return (name, most) if most > stage.reduce_bucket_size else None


def make_module(
    stage: Zero, ctx: Context, model: ModelSource, precision: Precision,
    config: Mapping[str, Any], divider: ZeroDivider | None,
) -> nn.Module:  # fmt: skip
    """The module that DeepSpeed is given: this rank's parts of layers, parameters partitioned as
    they come, or whole ones; not yet loaded."""
    module, device = build_empty(model, precision), ctx.dist.device
    if divider is not None:
        divider.divide(model, module)
    if stage.stage == 3:
        _partition(module, device, torch_dtype(precision.compute), config, divider)
    materialize(module, device, buffer_device=device)
    if divider is not None:
        divider.mark(module)
    if stage.stage == 3:
        _tell_of_parameters(model, module)
    cast_buffers(module, precision)
    return module


def _partition(
    module: nn.Module, device: torch.device, compute: torch.dtype,
    config: Mapping[str, Any], divider: ZeroDivider | None,
) -> None:  # fmt: skip
    """Give each meta parameter uninitialised storage, and partition it as soon as it exists: no
    process holds more of the model than its part and one whole tensor."""
    partition = compat.partitioner(config, None if divider is None else divider.groups)

    def partitioned(_: str, parameter: nn.Parameter) -> nn.Parameter:
        empty = torch.empty_like(parameter, device=device, dtype=compute)
        made = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        partition(made)
        return made

    replace_parameters(module, partitioned)


def _tell_of_parameters(model: ModelSource, module: nn.Module) -> None:
    """Tell stage 3 which parameters to gather where it does not see their use."""
    import deepspeed

    for owner in model.external_parameter_modules(module):
        for parameter in owner.parameters():
            deepspeed.zero.register_external_parameter(owner, parameter)
    for block in model.compiled_modules(module):
        # Gathered as a whole, as hooks within would break its graph. Then frozen parameters are
        # not gathered in backward, so with an adapter the hooks stay.
        if all(parameter.requires_grad for parameter in block.parameters()):
            deepspeed.utils.set_z3_leaf_module(block, True)


def close_at_exit(ctx: Context, engine: Engine) -> None:
    """Close an engine as the run ends; held weakly, so that its memory can be freed before."""
    close = weakref.WeakMethod(engine.close)
    ctx.on_exit(lambda: (live := close()) and live())


def _expected(
    stage: Zero, ctx: Context, precision: Precision, plan: OptimizerPlan
) -> dict[str, Any]:
    """The description that the engine must have for the recipe to be what runs."""
    optimizer, parameters = stage.offload_optimizer, stage.offload_param
    return {
        **declared_facts(ctx, precision),
        "engine": "DeepSpeedEngine",
        "zero_stage": stage.stage,
        "tensor_parallel": 1 if stage.tensor_parallel is None else stage.tensor_parallel.size,
        "device": ctx.dist.device.type,
        "reduce": precision.reduce,
        "offload_optimizer": optimizer.device if optimizer else None,
        "offload_param": parameters.device if parameters else None,
        "max_grad_norm": plan.max_grad_norm,
        "accumulation": "unmanaged",
        "loss_scaling": precision.loss_scaling is not None,
    }


def _optimizer(stage: Zero, plan: OptimizerPlan, module: nn.Module) -> Optimizer:
    """The optimizer over the module's parameters, before DeepSpeed takes it apart."""
    axes = required(stage, torch.distributed.get_world_size())
    named = (
        one._replace(shape=compat.full_shape(one.parameter), shard=_shard(one.parameter, axes))
        for one in named_parameters(module)
    )
    (part,), (own,) = plan.parts, plan.divide(named)
    groups = groups_of(part, own)
    if not uses_cpu_adam(stage, part.algorithm):
        for one in own[:1]:
            require_zeros(part, one.parameter.device)
        return part.build(groups)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True, **part.hyperparameters)
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def _shard(parameter: nn.Parameter, axes: Axes) -> int:
    """Number of this rank's master among the parts of a parameter. Ranks of a tensor-parallel group
    have the same master of one that is not divided."""
    rank, whole = torch.distributed.get_rank(), whole_of(parameter)
    if whole is None:
        return rank
    # Such parameters have groups of their own on every rank.
    return axes.ranks + rank if is_divided(whole) else rank // axes.tensor

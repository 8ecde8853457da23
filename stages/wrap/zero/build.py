"""The way from a recipe's wrap.zero slot to a running engine.

Under tensor parallelism each rank's part of the layers is a whole model to DeepSpeed, which shards
it among the ranks that have the same part. Layers are divided as under wrap.fsdp, and not by
DeepSpeed's AutoTP, which builds the whole model on every rank, replaces modules, and sends pickles.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from pipeline import (
    Context,
    Engine,
    ModelSource,
    OptimizerPlan,
    Precision,
    StageError,
    torch_dtype,
)
from pipeline.utils import replace_text, with_values
from stages.wrap.axes import Axes, parameter_mesh, required, warn_of_slow_groups
from stages.wrap.build import (
    build_empty,
    cast_buffers,
    declared_facts,
    materialize,
    named_parameters,
    source_of,
    verify_engine,
)
from stages.wrap.context_compat import divide_sequence
from stages.wrap.optimizer_state import groups_of, require_zeros
from stages.wrap.passes import ModulePasses
from stages.wrap.shards import load_weights
from stages.wrap.tensor_divide import divide_layers, replace_parameters
from stages.wrap.zero import compat
from stages.wrap.zero.config import generate, rule_problems
from stages.wrap.zero.engine import ZeroEngine
from stages.wrap.zero.fields import ZeroFields, uses_cpu_adam

BEYOND_BUCKET = (
    "overlap_comm: the gradient of %s is larger than reduce_bucket_size, and DeepSpeed may use its "
    "memory again before it is sent; set reduce_bucket_size: %d"
)


def build(
    stage: ZeroFields, ctx: Context, model: ModelSource, precision: Precision, plan: OptimizerPlan
) -> Engine:
    """Create the parameters, initialise DeepSpeed, load its master weights, verify the engine.
    Without an optimizer the engine holds a model that is not trained."""
    # An optimizer stage of another package may not say its rules to `pipe check`.
    for problem in rule_problems(stage, precision.master, plan.rules):
        raise StageError(f"{problem.key}: {problem.message}", hint=problem.hint)
    config = generate(stage, precision, max_grad_norm=plan.max_grad_norm)
    if plan.parts and ctx.dist.is_main:
        replace_text(ctx.run_dir / "deepspeed.json", json.dumps(config, indent=1) + "\n")
    compat.start(ctx.dist, ctx.log)
    import deepspeed

    axes, device = required(stage, ctx.dist.world_size), ctx.dist.device
    model = source_of(model, plan)
    # Opened first: this compares the weights with the model.
    with contextlib.closing(model.weights()) as reader:
        module, groups = make_module(stage, ctx, model, precision, config, axes)
        group = divide_sequence(module, axes, device.type)
        if device.type == "cuda" and (large := beyond_bucket(stage, module)):
            ctx.log.warning(BEYOND_BUCKET, *large)
        live: Any = module
        if plan.parts or stage.stage == 3:
            with compat.quiet():
                live, *_ = deepspeed.initialize(
                    model=module,
                    optimizer=_optimizer(stage, plan, module, axes) if plan.parts else None,
                    config=dict(config),
                    dist_init_required=False,
                    mpu=groups,
                )
        passes = ModulePasses(module, model.scorer(live, group=group), ctx.dist, axes)
        engine = ZeroEngine(live, passes, precision, plan)
        # Held weakly, so that its memory can be freed before the run ends.
        close = weakref.WeakMethod(engine.close)
        ctx.on_exit(lambda: (alive := close()) and alive())
        # Load masters and make parameters from them: masters that DeepSpeed makes from
        # parameters have lost what the compute dtype rounds off.
        load_weights(engine.weights(), reader, ctx)
        engine.sync_compute_weights()
    verify_engine(ctx, engine, _expected(stage, ctx, precision, plan))
    return engine


def beyond_bucket(stage: ZeroFields, module: nn.Module) -> tuple[str, int] | None:
    """Name and elements of the largest gradient that stage 2 would reduce outside of its bucket
    during backward.

    DeepSpeed 0.19 reduces it on another stream and frees it, without telling the allocator of that
    stream, on ranks that hold no part of it (`average_tensor`, `clear_grad_attribute`)."""
    if not stage.overlap_comm or stage.stage != 2 or stage.offload_optimizer is not None:
        return None
    trained = ((name, one.numel()) for name, one in module.named_parameters() if one.requires_grad)
    name, most = max(trained, key=lambda pair: pair[1], default=("", 0))
    return (name, most) if most > stage.reduce_bucket_size else None


def make_module(
    stage: ZeroFields, ctx: Context, model: ModelSource, precision: Precision,
    config: Mapping[str, Any], axes: Axes,
) -> tuple[nn.Module, SimpleNamespace | None]:  # fmt: skip
    """The module that DeepSpeed is given: this rank's parts of layers, parameters partitioned as
    they come, or whole ones; not yet loaded. Next to it the groups of ranks that divide layers."""
    module, device = build_empty(model, precision), ctx.dist.device
    wholes, groups = dict[str, DTensor](), None
    if axes.tensor > 1:
        wholes, groups = _divide(stage, ctx, model, module, axes)
    if stage.stage == 3:
        compute = torch_dtype(precision.compute)
        compat.partition_parameters(module, device, compute, config, groups)
    materialize(module, device, buffer_device=device)
    parameter: Any
    for name, parameter in module.named_parameters():
        if (whole := wholes.get(name)) is not None:
            parameter.part_of = whole
            # The rest is counted once in the norm of gradients.
            parameter.tensor_model_parallel = not whole.placements[0].is_replicate()
    if stage.stage == 3:
        _declare_uses(model, module)
    cast_buffers(module, precision)
    return module, groups


def _divide(
    stage: ZeroFields, ctx: Context, model: ModelSource, module: nn.Module, axes: Axes
) -> tuple[dict[str, DTensor], SimpleNamespace]:
    """Divide the layers of a module on the meta device in place; its parameters become plain
    tensors, this rank's parts (collective). Returns the tensors they are parts of, and the groups
    of ranks. Raises StageError for a model that does not divide so."""
    assert stage.tensor_parallel is not None
    warn_of_slow_groups(ctx, axes)
    with with_values():
        mesh = parameter_mesh(axes, ctx.dist.device.type, axes.data * axes.context)
    late = stage.stage == 3
    divide_layers(stage.tensor_parallel, module, model.blocks(module), mesh["tensor"], late=late)
    wholes: dict[str, Any] = {name: one.data for name, one in module.named_parameters()}
    replace_parameters(module, lambda _, parameter: parameter.data.to_local())  # type: ignore[attr-defined]
    data, tensor = mesh["shard"].get_group(), mesh["tensor"].get_group()
    # With flat tensors of different lengths, sums over more than two ranks are made in different
    # orders, and what all hold alike would drift apart.
    own = torch.tensor([one.numel() for one in module.parameters()], device=ctx.dist.device)
    first = own.clone()
    dist.broadcast(first, dist.get_global_rank(tensor, 0), tensor)
    differ = (own != first).any().to(torch.int32)
    dist.all_reduce(differ, dist.ReduceOp.MAX)
    if stage.stage < 3 and differ and dist.get_world_size(data) > 2:
        message = "tensor_parallel: the vocabulary, or a layer, divides into unequal parts"
        raise StageError(message, hint="set stage: 3, or a size that divides it")
    # As DeepSpeed asks for them of Megatron's `mpu`.
    return wholes, SimpleNamespace(
        get_data_parallel_group=lambda: data,
        get_data_parallel_group_ranks=lambda: dist.get_process_group_ranks(data),
        get_data_parallel_world_size=lambda: dist.get_world_size(data),
        get_data_parallel_rank=lambda: dist.get_rank(data),
        get_model_parallel_group=lambda: tensor,
        get_model_parallel_world_size=lambda: dist.get_world_size(tensor),
        get_model_parallel_rank=lambda: dist.get_rank(tensor),
    )


def _declare_uses(model: ModelSource, module: nn.Module) -> None:
    """Declare parameters that stage 3 has to gather where it does not see their use."""
    import deepspeed

    for owner in model.external_parameter_modules(module):
        for parameter in owner.parameters():
            deepspeed.zero.register_external_parameter(owner, parameter)
    for block in model.compiled_modules(module):
        # Gathered as a whole, as hooks within would break its graph. Then frozen parameters are
        # not gathered in backward, so with an adapter the hooks stay.
        if all(parameter.requires_grad for parameter in block.parameters()):
            deepspeed.utils.set_z3_leaf_module(block, True)


def _optimizer(
    stage: ZeroFields, plan: OptimizerPlan, module: nn.Module, axes: Axes
) -> torch.optim.Optimizer:
    """The optimizer over the module's parameters, before DeepSpeed takes it apart."""
    rank, named = dist.get_rank(), []
    for one in named_parameters(module):
        whole, shard = compat.whole_of(one.parameter), rank
        if whole is not None:
            # Parts of layers differ on every rank. Ranks of a tensor-parallel group have the same
            # master of what is not divided.
            same = whole.placements[0].is_replicate()
            shard = rank // axes.tensor if same else axes.ranks + rank
        named.append(one._replace(shape=compat.full_shape(one.parameter), shard=shard))
    (part,), (own,) = plan.parts, plan.divide(named)
    groups = groups_of(part, own)
    if not uses_cpu_adam(stage, part.algorithm):
        if own:
            require_zeros(part, own[0].parameter.device)
        return part.build(groups)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True, **part.hyperparameters)
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def _expected(
    stage: ZeroFields, ctx: Context, precision: Precision, plan: OptimizerPlan
) -> dict[str, Any]:
    """The description that the engine must have for the recipe to be what runs."""
    if not plan.parts:
        return {"world_size": ctx.dist.world_size, "compute": [precision.compute]}
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

"""The live half of wrap.zero: a model that DeepSpeed trains, or holds without training it.

Under tensor parallelism each rank's part of the layers is a whole model to DeepSpeed, which shards
it among the ranks that have the same part. Layers are divided as under wrap.fsdp, and not by
DeepSpeed's AutoTP, which builds the whole model on every rank, replaces modules, and sends pickles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline import (
    WEIGHT,
    CheckpointError,
    Context,
    Engine,
    EngineState,
    Fragment,
    LossParts,
    MicroBatch,
    ModelSource,
    Objective,
    OptimizerPlan,
    Precision,
    StageError,
    StepGuard,
    StepReport,
    Unit,
    torch_dtype,
)
from pipeline.utils import replace_text
from stages.model.declared import FrozenSource
from stages.objectives.cross_entropy import StepSums
from stages.wrap.axes import Axes, parameter_mesh, required, warn_of_slow_groups
from stages.wrap.build import (
    build_empty,
    declared_facts,
    dtype_names,
    materialize,
    named_parameters,
    parameter_count,
    replace_parameters,
    verify_engine,
)
from stages.wrap.context_compat import divide_sequence
from stages.wrap.optimizer_state import (
    UPDATES,
    declared_state,
    fixed_state,
    group_state,
    groups_of,
    read_moments,
    require_zeros,
    set_updates,
    write_moments,
)
from stages.wrap.shards import load_weights
from stages.wrap.tensor_divide import divide_layers
from stages.wrap.torch_engine import ModulePasses, Passes, TorchEngine
from stages.wrap.zero import compat
from stages.wrap.zero.config import beyond_bucket, generate, rule_problems
from stages.wrap.zero.fields import ZeroFields, uses_cpu_adam


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
    model = model if plan.parts else FrozenSource(model)
    # Opened first: this compares the weights with the model.
    with contextlib.closing(model.weights()) as reader:
        module, groups = make_module(stage, ctx, model, precision, config, axes)
        group = divide_sequence(module, axes, device.type)
        if device.type == "cuda" and (warning := beyond_bucket(stage, module)):
            ctx.log.warning("%s", warning)
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
    materialize(module, device, precision, buffer_device=device)
    parameter: Any
    for name, parameter in module.named_parameters():
        if (whole := wholes.get(name)) is not None:
            parameter.part_of = whole
            # The rest is counted once in the norm of gradients.
            parameter.tensor_model_parallel = not whole.placements[0].is_replicate()
    if stage.stage == 3:
        import deepspeed

        # What stage 3 has to gather where it does not see its use.
        for owner in model.external_parameter_modules(module):
            for parameter in owner.parameters():
                deepspeed.zero.register_external_parameter(owner, parameter)
        for block in model.compiled_modules(module):
            # Gathered as a whole, as hooks within would break its graph. Then frozen parameters
            # are not gathered in backward, so with an adapter the hooks stay.
            if all(parameter.requires_grad for parameter in block.parameters()):
                deepspeed.utils.set_z3_leaf_module(block, True)
    return module, groups


def _divide(
    stage: ZeroFields, ctx: Context, model: ModelSource, module: nn.Module, axes: Axes
) -> tuple[dict[str, DTensor], SimpleNamespace]:
    """Divide the layers of a module on the meta device in place; its parameters become plain
    tensors, this rank's parts (collective). Returns the tensors they are parts of, and the groups
    of ranks. Raises StageError for a model that does not divide so."""
    assert stage.tensor_parallel is not None
    warn_of_slow_groups(ctx, axes)
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


class ZeroEngine(TorchEngine):
    """DeepSpeed's engine. Accumulation is unmanaged: gradients are summed over micro-batches and
    applied by one `step`. A model without an optimizer is partitioned at stage 3, else whole."""

    def __init__(
        self, live: Any, passes: Passes, precision: Precision, plan: OptimizerPlan
    ) -> None:
        """`live` is DeepSpeed's engine, or the module if nothing is partitioned."""
        super().__init__(passes, [], precision, plan)
        self.deepspeed = live
        self._base_rates: list[float] = []
        if plan.parts:
            # Groups are renewed when a checkpoint is loaded, base rates are not.
            self._base_rates = [group["lr"] for group in self.zero.optimizer.param_groups]
            compat.set_loss_scale(self.zero, self.loss_scale.scale)

    @property
    def zero(self) -> Any:
        """DeepSpeed's owner of partitions; None without."""
        return getattr(self.deepspeed, "optimizer", None)

    @functools.cached_property
    def _flats(self) -> list[compat.FlatMaster]:
        return list(compat.flat_masters(self.zero, self.parts[0])) if self.plan.parts else []

    def accumulate(
        self, batches: Iterable[MicroBatch], objective: Objective, *, counts: Mapping[Unit, float]
    ) -> LossParts:
        sums = StepSums(objective, self.device, counts, factor=self.averaged_over)
        backward = functools.partial(self.deepspeed.backward, scale_wrt_gas=False)
        return self.passes.train(batches, sums, self.microbatch, backward)

    def step(
        self, *, lr_scales: Sequence[float], should_step: StepGuard | None = None
    ) -> StepReport:
        self.announce_change()
        live, optimizer, (rule,) = self.deepspeed, self.zero.optimizer, self.plan.parts
        for group, base in zip(optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base * lr_scales[0]
        scale, update, asked = self.loss_scale.scale, optimizer.step, list[bool]()

        def guarded(*args: Any, **kwargs: Any) -> Any:
            # DeepSpeed updates in several parts, and asks for none where gradients overflowed.
            if should_step is not None and not asked:
                asked.append(should_step(compat.running_grad_norm(live)))
            return update(*args, **kwargs) if all(asked) else None

        optimizer.step = guarded
        try:
            # The first update here shows what the rule keeps.
            with nullcontext() if self._applied else declared_state(optimizer, rule):
                live.step()
        finally:
            del optimizer.step
        finite = bool(live.was_step_applied())
        self._adjust_scale(overflowed=not finite)
        compat.set_loss_scale(self.zero, self.loss_scale.scale)
        applied = finite and all(asked)
        self._applied += applied
        norm = float(live.get_global_grad_norm())
        return StepReport(grad_norm=norm, applied=applied, loss_scale=scale)

    def state(self) -> EngineState:
        counts, names = dict[str, int](), dict[int, list[str]]()
        for flat in self._flats:
            kept = flat.state(self.plan.parts[0])
            for name in flat.names:
                made = self._restored.get(name, 0) + self._applied
                counts[name] = int(kept.get(UPDATES, made))
            names.setdefault(flat.group, []).extend(flat.names)
        groups = []
        for at in sorted(names):
            given = {**self.zero.optimizer.param_groups[at], "lr": self._base_rates[at]}
            groups.append(group_state(self.plan.parts[0], given, names[at]))
        fixed = fixed_state(self.parts[0], groups, compat.full_shape)
        scale = None if self._scaling is None else self.loss_scale
        return dataclasses.replace(fixed, updates=counts, loss_scale=scale)

    @property
    def lasting_fragments(self) -> bool:
        lasting = bool(self.plan.parts) and super().lasting_fragments
        return lasting and "nvme" not in compat.offload_devices(self.zero)

    def restore(self, state: EngineState) -> Iterator[Fragment]:
        for flat in self._flats:
            counts = {name: state.updates[name] for name in flat.names}
            if len(set(counts.values())) > 1:
                message = "parameters that ZeRO updates together were updated unequally often"
                raise CheckpointError(f"{message}: {counts}")
        yield from super().restore(state)
        compat.restore_bias_correction(self.zero.optimizer)
        compat.set_loss_scale(self.zero, self.loss_scale.scale)

    def _fragments(self, *, write: bool) -> Iterator[Fragment]:
        for flat in self._flats:
            rule = self.plan.parts[0]
            with flat.present(write=write):
                state, moments = flat.state(rule), dict[str, Tensor]()
                if write:
                    set_updates(state, self._restored[flat.names[0]])
                    # Written as a whole, as blocks of packed values straddle parameters; read in
                    # parts, as there may be no memory for a whole unpacked moment during training.
                    moments = read_moments(state, rule, 0, flat.tensor.numel())
                for part in flat.parts:
                    own = {name: part.of(values) for name, values in moments.items()}
                    own = own or read_moments(state, rule, part.low, part.low + part.length)
                    yield from part.fragments({WEIGHT: part.of(flat.tensor), **own})
                write_moments(state, rule, moments)
        yield from compat.frozen_fragments(self.parts[0], self.zero)

    def weights(self) -> Iterator[Fragment]:
        """This rank's part of every master, frozen parameter and stored buffer, to be overwritten,
        each before the next is taken. Then call `sync_compute_weights`."""
        for flat in self._flats:
            with flat.present(write=True):
                for part in flat.parts:
                    yield from part.fragments({WEIGHT: part.of(flat.tensor)})
        yield from compat.frozen_fragments(self.parts[0], self.zero)

    def sync_compute_weights(self) -> None:
        if self.plan.parts:
            compat.update_compute_weights(self.zero)

    def describe(self) -> Mapping[str, Any]:
        """Read off the engine, its optimizers and its tensors, not off a configuration."""
        (module,) = self.parts
        facts = {
            "engine": type(self.deepspeed).__name__,
            "model": type(module).__name__,
            "world_size": self.passes.axes.ranks,
            "axes": self.passes.axes.sizes,
            "device": self.device.type,
            "compute": dtype_names(module.parameters()),
            "buffers": dtype_names(module.buffers()),
            "parameters": parameter_count(module, compat.full_shape),
            "trained_parameters": sum(
                math.prod(compat.full_shape(one))
                for one in module.parameters()
                if one.requires_grad
            ),
        }
        return facts | (compat.facts(self.deepspeed) if self.plan.parts else {})

    def close(self) -> None:
        if self.deepspeed is None:
            return
        if self.zero is not None:
            from deepspeed.utils import groups

            self.deepspeed.destroy()
            groups.mpu = None  # otherwise left to the next engine of this process
        self.deepspeed = None
        del self.passes, self.parts
        vars(self).pop("_flats", None)

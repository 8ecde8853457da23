"""Engine of wrap.fsdp: meshes, module or stages of a pipeline, optimizers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from pipeline import Context, ModelSource, OptimizerPlan, Precision, StageError, torch_dtype
from pipeline.utils import local_part, with_values
from stages.model.declared import outline
from stages.wrap.axes import (
    FOLDED,
    Axes,
    expert_mesh,
    layer_ranges,
    parameter_mesh,
    required,
    warn_of_slow_groups,
)
from stages.wrap.build import (
    build_module,
    build_modules,
    declared_facts,
    source_of,
    verify_engine,
)
from stages.wrap.context.attention import divide_sequence
from stages.wrap.fsdp_fields import FsdpFields
from stages.wrap.fsdp_units import DATA_AXES, UnitDivider
from stages.wrap.optimizer_state import optimizers_of_parts
from stages.wrap.passes import ModulePasses, Passes
from stages.wrap.pipeline.split import TiedEmbedding, is_tied, keep_layers
from stages.wrap.tensor.divide import resolve_plan
from stages.wrap.torch_compat import reshard, sharding_facts
from stages.wrap.torch_engine import TorchEngine, total_norm


def build(
    config: FsdpFields, ctx: Context, model: ModelSource, precision: Precision, plan: OptimizerPlan
) -> TorchEngine:
    """Shard units then the root on the meta device; each rank materializes and loads its shards.
    Raises StageError for shards that do not divide the ranks, or do not divide among the ranks of
    experts."""
    axes, model = required(config, ctx.dist.world_size), source_of(model, plan)
    both, device = axes.data * axes.context, ctx.dist.device.type
    shards = config.shards(axes, ctx.dist.local_world_size)
    if both % shards:
        raise StageError(f"{both} processes do not divide into shard groups of {shards}")
    among = 1 if config.expert_parallel is None else config.expert_parallel.size
    if shards % among:
        raise StageError(f"expert_parallel: {shards} shards do not divide among {among} ranks")
    warn_of_slow_groups(ctx, axes)
    with with_values():
        mesh = parameter_mesh(axes, device, shards)
        experts = expert_mesh(axes, device, shards, among) if among > 1 else None
    divider = UnitDivider(config, model, precision, mesh, experts)
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    always = DATA_AXES[config.sharding]
    facts = {name: size for name, size in sizes.items() if size > 1 or name in always}
    passes: Passes
    tied: TiedEmbedding | None = None
    if axes.pipeline > 1:
        passes, whole, tied = _stages(ctx, model, precision, divider, mesh, axes, plan)
    else:
        whole = build_module(ctx, model, precision, shard=divider, **divider.places)
        group = divide_sequence(whole, axes, device)
        passes = ModulePasses(whole, model.scorer(whole, group=group), ctx.dist, axes)
    optimizers = optimizers_of_parts(plan, whole, passes.parts)
    rest = passes, optimizers, precision, plan, whole
    engine = FsdpEngine(facts, tied, config.reduce_every_microbatch, *rest)
    expected = {
        **declared_facts(ctx, precision),
        "engine": "fully_shard",
        "mesh": facts,
        "units": len(divider.units),
        "reshard_after_forward": sorted(divider.reshard_after_forward) or [False],
        "device": "cpu" if config.cpu_offload else device,
        "cpu_offload": config.cpu_offload,
    }
    verify_engine(ctx, engine, expected)
    return engine


def _stages(
    ctx: Context, model: ModelSource, precision: Precision, divider: UnitDivider,
    mesh: DeviceMesh, axes: Axes, plan: OptimizerPlan,
) -> tuple[Passes, nn.Module, TiedEmbedding | None]:  # fmt: skip
    """Cut this rank's stages out of the model, divide each, and load them (collective); returns
    them with the whole model on the meta device, and with the copies of a tied embedding.

    Raises StageError for a model that does not divide into stages, for a tied embedding whose two
    stages would be on one rank, and if nothing is trained on this rank or in the first stage, as
    backward begins with an output that needs a gradient.
    """
    from stages.wrap.pipeline.schedule import Pipeline, PipelinePasses, Stage

    asked = divider.config.pipeline_parallel
    assert asked is not None
    whole: Any = outline(model)
    blocks, tied = model.blocks(whole), is_tied(whole)
    if asked.schedule in FOLDED and tied:
        raise StageError(
            f"pipeline_parallel: {asked.schedule} puts the first and the last stage on one rank, "
            "and this model's head shares the embedding's weight",
            hint="choose another schedule",
        )
    group, width = mesh["pipeline"].get_group(), whole.config.get_text_config().hidden_size
    pipeline = Pipeline(
        schedule=asked.schedule, group=group, stages_per_rank=asked.per_rank, width=width,
        dtype=torch_dtype(precision.compute), device=ctx.dist.device,
    )  # fmt: skip
    if divider.config.tensor_parallel is not None:
        resolve_plan(divider.config.tensor_parallel, whole, blocks)
    head = whole.get_input_embeddings().weight.numel()
    block = sum(parameter.numel() for parameter in blocks[0].parameters())
    ranges = layer_ranges(len(blocks), pipeline.count, head, block)

    def make(module: nn.Module, *, number: int) -> None:
        keep_layers(module, ranges[number])
        last, beat = number == pipeline.count - 1, ctx.dist.heartbeat.beat
        stage = Stage(module, first=number == 0, last=last, dtype=pipeline.dtype, beat=beat)
        pipeline.stages.append(stage)
        divider(module)

    cuts = [functools.partial(make, number=number) for number in pipeline.own()]
    modules: list[Any] = [*build_modules(ctx, model, precision, cuts, **divider.places)]
    for stage in pipeline.stages:
        among = divide_sequence(stage.module, axes, ctx.dist.device.type)
        if stage.last:
            stage.scorer = model.scorer(stage.module, group=among, forward=stage.forward)
    passes = PipelinePasses(pipeline, modules, ctx.dist, axes)
    trains = [any(one.requires_grad for one in module.parameters()) for module in modules]
    if plan.parts and (not any(trains) or (0 in pipeline.own() and not trains[0])):
        raise StageError(
            "pipeline_parallel: none of the trained weights are in this rank's blocks",
            hint="train weights in all blocks, or leave pipeline_parallel out",
        )
    if not tied:
        return passes, whole, None
    held = dict(zip(pipeline.own(), modules, strict=True))
    first, last = (
        held[number].get_input_embeddings().weight if number in held else None
        for number in (0, pipeline.count - 1)
    )
    return passes, whole, TiedEmbedding(pipeline.group, first, last)


class FsdpEngine(TorchEngine):
    """Shards on every rank; parameters gathered unit by unit, gradients reduce-scattered."""

    def __init__(
        self, mesh: Mapping[str, int], tied: TiedEmbedding | None, reduce_always: bool, *rest: Any
    ) -> None:
        """`mesh` has the sizes of the axes that a recipe asks for, `tied` the embedding's copies on
        the stages of a pipeline."""
        super().__init__(*rest)
        self._mesh, self._tied, self._reduce_always = mesh, tied, reduce_always

    @contextlib.contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        (root,) = self.parts
        assert isinstance(root, FSDPModule)
        reduces = last or self._reduce_always
        root.set_requires_gradient_sync(reduces)
        # Otherwise the buffer of the root's gradients stays through the next forward.
        root.set_is_last_backward(reduces)
        yield

    def gradient_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        copy = None
        if self._tied is not None:
            self._tied.sum_gradients()
            copy = None if self._tied.repeated is None else self._tied.repeated.grad
        divided = self.passes.axes.pipeline > 1
        return total_norm([one for one in gradients if one is not copy], divided=divided)

    def to_sharded(self) -> None:
        for part in self.parts:
            reshard(part)

    def describe(self) -> Mapping[str, Any]:
        self.to_sharded()
        own = (local_part(one) for part in self.parts for one in part.parameters())
        return {
            "engine": "fully_shard" if isinstance(self.parts[0], FSDPModule) else "none",
            **self.common_facts(),
            "mesh": self._mesh,
            **sharding_facts(self.parts),
            "sharded_parameters": sum(one.numel() for one in own),
        }

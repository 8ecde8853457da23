"""wrap.fsdp over the stages of a pipeline."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pipeline import (
    Context,
    ModelSource,
    OptimizerPlan,
    Precision,
    StageError,
    torch_dtype,
)
from stages.model.declared import outline
from stages.wrap.axes import FOLDED, Axes
from stages.wrap.build import build_modules, named_parts
from stages.wrap.context.attention import divide_sequence
from stages.wrap.fsdp_engine import FsdpEngine, places
from stages.wrap.fsdp_units import UnitDivider
from stages.wrap.optimizer_groups import LivePart, build_optimizers
from stages.wrap.pipeline.schedule import Pipeline, PipelinePasses, PipelinePlan, Stage
from stages.wrap.pipeline.split import is_tied, keep_layers, layer_ranges
from stages.wrap.pipeline.ties import TiedEmbedding
from stages.wrap.tensor.divide import resolve_plan

if TYPE_CHECKING:
    from stages.wrap.fsdp import Fsdp


def build_pipeline(
    config: Fsdp,
    ctx: Context,
    model: ModelSource,
    precision: Precision,
    plan: OptimizerPlan,
    divider: UnitDivider,
    mesh: DeviceMesh,
    axes: Axes,
) -> FsdpEngine:
    """Cut this rank's stages out of the model, divide each, and load them (collective). Raises
    StageError for a model that does not divide into stages."""
    whole: Any = outline(model)
    blocks = model.blocks(whole)
    shape = _pipeline_plan(config, whole, mesh, precision, ctx.dist.device)
    if config.tensor_parallel is not None:
        resolve_plan(config.tensor_parallel, whole, blocks)
    head = whole.get_input_embeddings().weight.numel()
    block = sum(parameter.numel() for parameter in blocks[0].parameters())
    ranges = layer_ranges(len(blocks), shape.count, head, block)
    stages: list[Stage] = []

    def make(module: nn.Module, *, number: int) -> None:
        keep_layers(module, ranges[number])
        last = number == shape.count - 1
        beat = ctx.dist.heartbeat.beat
        stages.append(Stage(module, first=number == 0, last=last, dtype=shape.dtype, beat=beat))
        divider(module)

    cuts = [functools.partial(make, number=number) for number in shape.own()]
    modules = build_modules(ctx, model, precision, cuts, **places(config, divider))
    for stage in stages:
        group = divide_sequence(stage.module, axes, ctx.dist.device.type)
        if stage.last:
            stage.scorer = model.scorer(stage.module, group=group, forward=stage.forward)
    tied = _tie(shape, modules) if is_tied(whole) else None
    passes = PipelinePasses(Pipeline(shape, stages), modules, ctx.dist, axes)
    optimizers = _optimizers(plan, whole, modules, first=0 in shape.own())
    return FsdpEngine(config, mesh, passes, optimizers, precision, plan, whole, tied=tied)


def _pipeline_plan(
    config: Fsdp, whole: Any, mesh: DeviceMesh, precision: Precision, device: torch.device
) -> PipelinePlan:
    """The pipeline that a recipe asks for. Raises StageError for a tied embedding whose two stages
    would be on one rank."""
    asked = config.pipeline_parallel
    assert asked is not None
    if asked.schedule in FOLDED and is_tied(whole):
        raise StageError(
            f"pipeline_parallel: {asked.schedule} puts the first and the last stage on one rank, "
            "and this model's head shares the embedding's weight",
            hint="choose another schedule",
        )
    return PipelinePlan(
        schedule=asked.schedule,
        group=mesh["pipeline"].get_group(),
        stages_per_rank=asked.per_rank,
        width=whole.config.get_text_config().hidden_size,
        dtype=torch_dtype(precision.compute),
        device=device,
    )


def _optimizers(
    plan: OptimizerPlan, whole: nn.Module, modules: Sequence[nn.Module], *, first: bool
) -> list[LivePart]:
    """The optimizers of this rank's stages, in the groups of the whole model. Raises StageError if
    nothing is trained on this rank, or in the model's `first` stage, where backward begins with an
    output that needs a gradient."""
    here = {one for module in modules for one in module.parameters()}
    trains = [any(one.requires_grad for one in module.parameters()) for module in modules]
    if plan.parts and (not any(trains) or (first and not trains[0])):
        raise StageError(
            "pipeline_parallel: none of the trained weights are in this rank's blocks",
            hint="train weights in all blocks, or leave pipeline_parallel out",
        )
    return build_optimizers(plan, named_parts(whole, modules), here)


def _tie(shape: PipelinePlan, modules: Sequence[nn.Module]) -> TiedEmbedding:
    """The embedding's copies on this rank."""
    copies: dict[int, nn.Parameter] = {}
    for number, module in zip(shape.own(), modules, strict=True):
        if number in (0, shape.count - 1):
            embedding: Any = module.get_input_embeddings()  # type: ignore[operator]
            copies[number] = embedding.weight
    return TiedEmbedding(shape.group, copies.get(0), copies.get(shape.count - 1))

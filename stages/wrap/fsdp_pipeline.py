"""The stages of a pipeline under wrap.fsdp."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pipeline import Context, ModelSource, OptimizerPlan, Precision, StageError, torch_dtype
from stages.model.declared import outline
from stages.wrap.axes import FOLDED, Axes
from stages.wrap.build import build_modules
from stages.wrap.context.attention import divide_sequence
from stages.wrap.fsdp_units import UnitDivider
from stages.wrap.optimizer_groups import LivePart, make_optimizers
from stages.wrap.pipeline.schedule import Pipeline, PipelinePasses, PipelinePlan, Stage
from stages.wrap.pipeline.split import is_tied, keep_layers, layer_ranges
from stages.wrap.pipeline.ties import TiedEmbedding
from stages.wrap.tensor.divide import resolve_plan

if TYPE_CHECKING:
    from stages.wrap.fsdp import Fsdp


class Stages(NamedTuple):
    """This rank's stages, ready to be trained."""

    passes: PipelinePasses
    optimizers: list[LivePart]
    whole: nn.Module
    """The whole model on the meta device."""
    tied: TiedEmbedding | None


def build_stages(
    config: Fsdp, ctx: Context, model: ModelSource, precision: Precision, plan: OptimizerPlan,
    divider: UnitDivider, mesh: DeviceMesh, axes: Axes,
) -> Stages:  # fmt: skip
    """Cut this rank's stages out of the model, divide each, and load them (collective). Raises
    StageError for a model that does not divide into stages, for a tied embedding whose two stages
    would be on one rank, and if nothing is trained on this rank or in the first stage, as backward
    begins with an output that needs a gradient."""
    asked = config.pipeline_parallel
    assert asked is not None
    whole: Any = outline(model)
    blocks, tied = model.blocks(whole), is_tied(whole)
    if asked.schedule in FOLDED and tied:
        raise StageError(
            f"pipeline_parallel: {asked.schedule} puts the first and the last stage on one rank, "
            "and this model's head shares the embedding's weight",
            hint="choose another schedule",
        )
    shape = PipelinePlan(
        schedule=asked.schedule,
        group=mesh["pipeline"].get_group(),
        stages_per_rank=asked.per_rank,
        width=whole.config.get_text_config().hidden_size,
        dtype=torch_dtype(precision.compute),
        device=ctx.dist.device,
    )
    if config.tensor_parallel is not None:
        resolve_plan(config.tensor_parallel, whole, blocks)
    head = whole.get_input_embeddings().weight.numel()
    block = sum(parameter.numel() for parameter in blocks[0].parameters())
    ranges = layer_ranges(len(blocks), shape.count, head, block)
    stages: list[Stage] = []

    def make(module: nn.Module, *, number: int) -> None:
        keep_layers(module, ranges[number])
        last, beat = number == shape.count - 1, ctx.dist.heartbeat.beat
        stages.append(Stage(module, first=number == 0, last=last, dtype=shape.dtype, beat=beat))
        divider(module)

    cuts = [functools.partial(make, number=number) for number in shape.own()]
    modules: list[Any] = [*build_modules(ctx, model, precision, cuts, **divider.places)]
    for stage in stages:
        group = divide_sequence(stage.module, axes, ctx.dist.device.type)
        if stage.last:
            stage.scorer = model.scorer(stage.module, group=group, forward=stage.forward)
    passes = PipelinePasses(Pipeline(shape, stages), modules, ctx.dist, axes)
    trains = [any(one.requires_grad for one in module.parameters()) for module in modules]
    if plan.parts and (not any(trains) or (0 in shape.own() and not trains[0])):
        raise StageError(
            "pipeline_parallel: none of the trained weights are in this rank's blocks",
            hint="train weights in all blocks, or leave pipeline_parallel out",
        )
    optimizers = make_optimizers(plan, whole, modules)
    if not tied:
        return Stages(passes, optimizers, whole, None)
    held = dict(zip(shape.own(), modules, strict=True))
    first, last = (
        held[number].get_input_embeddings().weight if number in held else None
        for number in (0, shape.count - 1)
    )
    return Stages(passes, optimizers, whole, TiedEmbedding(shape.group, first, last))

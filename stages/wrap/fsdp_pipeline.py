"""wrap.fsdp over the stages of a pipeline."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipeline import (
    Context,
    EngineState,
    LossParts,
    Measure,
    MicroBatch,
    ModelSource,
    NamedParameter,
    Objective,
    OptimizerPlan,
    Precision,
    Scorer,
    StageError,
    Unit,
    torch_dtype,
)
from stages.batches.layout import equal_shapes
from stages.model.declared import outline
from stages.model.documents_compat import known_documents
from stages.objectives.judge import StepSums, judged, measured
from stages.wrap.axes import FOLDED, Axes
from stages.wrap.build import build_modules, named_parameters, shard_number
from stages.wrap.context.attention import divide_sequence
from stages.wrap.fsdp_engine import FsdpEngine, places
from stages.wrap.fsdp_units import UnitDivider
from stages.wrap.gradients import total_norm
from stages.wrap.optimizer_groups import LivePart, build_optimizers, grouped_state
from stages.wrap.pipeline.schedule import Passed, Pipeline, PipelinePlan, Stage
from stages.wrap.pipeline.split import is_tied, keep_layers, layer_ranges
from stages.wrap.pipeline.ties import TiedEmbedding
from stages.wrap.tensor.divide import resolve_plan

if TYPE_CHECKING:
    from stages.wrap.fsdp import Fsdp

EVALUATED = 4
"""Micro-batches for each stage that an evaluation passes on at a time."""


def build_pipeline(
    config: Fsdp,
    ctx: Context,
    model: ModelSource,
    precision: Precision,
    plan: OptimizerPlan,
    divider: UnitDivider,
    mesh: DeviceMesh,
    axes: Axes,
) -> PipelineEngine:
    """Cut this rank's stages out of the model, divide each, and load them (collective). Raises
    StageError for a model that does not divide into stages."""
    whole: Any = outline(model)
    blocks = model.blocks(whole)
    shape = _pipeline_plan(config, whole, mesh, precision, ctx.dist.device)
    if config.tensor_parallel is not None:
        resolve_plan(config.tensor_parallel, whole, blocks)
    ranges = _ranges(whole, blocks, shape.count)
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
            stage.scorer = model.scorer(stage.module, group, stage.forward)
    tie = _tie(shape, modules) if is_tied(whole) else None
    passes = Passes(Pipeline(shape, stages), whole, modules, tie)
    optimizers = _optimizers(plan, whole, modules)
    rest = (modules[0], model.scorer(modules[0]), optimizers, ctx, precision, plan, axes)
    return PipelineEngine(passes, config, mesh, *rest)


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


def _ranges(whole: Any, blocks: Sequence[nn.Module], stages: int) -> list[range]:
    """Layers of each stage, by the elements of the model's weights."""
    head = whole.get_input_embeddings().weight.numel()
    block = sum(parameter.numel() for parameter in blocks[0].parameters())
    return layer_ranges(len(blocks), stages, head, block)


def _optimizers(
    plan: OptimizerPlan, whole: nn.Module, modules: Sequence[nn.Module]
) -> list[LivePart]:
    """The optimizers of this rank's stages, in the groups of the whole model. Raises StageError if
    nothing is trained on this rank."""
    here = set(_here(modules).values())
    if plan.parts and not any(parameter.requires_grad for parameter in here):
        raise StageError(
            "pipeline_parallel: none of the trained weights are in this rank's blocks",
            hint="train weights in all blocks, or leave pipeline_parallel out",
        )
    return build_optimizers(plan, _named(whole, modules), here)


def _named(whole: nn.Module, modules: Sequence[nn.Module]) -> list[NamedParameter]:
    """The parameters of the whole model; those of other ranks are without memory."""
    here = _here(modules)
    named = []
    for one in named_parameters(whole):
        parameter = here.get(one.name, one.parameter)
        named.append(one._replace(parameter=parameter, shard=shard_number(parameter)))
    return named


def _here(modules: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters of this rank's stages, by name."""
    return {name: one for module in modules for name, one in module.named_parameters()}


def _tie(shape: PipelinePlan, modules: Sequence[nn.Module]) -> TiedEmbedding:
    """The embedding's copies on this rank."""
    copies: dict[int, nn.Parameter] = {}
    for number, module in zip(shape.own(), modules, strict=True):
        if number in (0, shape.count - 1):
            embedding: Any = module.get_input_embeddings()  # type: ignore[operator]
            copies[number] = embedding.weight
    return TiedEmbedding(shape.group, copies.get(0), copies.get(shape.count - 1))


@dataclass(frozen=True)
class Passes:
    """A rank's stages, and everything that passes micro-batches through them."""

    pipeline: Pipeline
    whole: nn.Module
    """The whole model, without memory."""
    modules: Sequence[nn.Module]
    tied: TiedEmbedding | None


class PipelineEngine(FsdpEngine):
    """Stages of a model on every rank, each sharded; micro-batches pass through all of them."""

    def __init__(self, passes: Passes, config: Fsdp, mesh: DeviceMesh, *rest: Any) -> None:
        super().__init__(config, mesh, *rest)
        self._pipeline, self._whole, self._tied = passes.pipeline, passes.whole, passes.tied
        self.modules = tuple(passes.modules)

    @property
    def parts(self) -> Sequence[nn.Module]:
        return self.modules

    def accumulate(
        self, batches: Iterable[MicroBatch], objective: Objective, *, counts: Mapping[Unit, float]
    ) -> LossParts:
        factor = self.averaged_over * (1.0 if self.scaler is None else self.scaler.scale)
        sums = StepSums(objective, self.device, counts, factor=factor)
        even = self._even(batches)

        def loss(scorer: Scorer, number: int, inputs: Mapping[str, Tensor]) -> Tensor:
            whole, own = even[number]
            return sums.add(judged(objective, scorer, own, whole, **inputs))

        with known_documents(*(own for _, own in even)):
            self._pipeline.run(even, loss)
        return sums.part(counted=self.counts_rows)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch], measure: Measure) -> Generator[Tensor | None]:
        rest, size = iter(batches), EVALUATED * self._axes.pipeline
        for part in self.parts:
            part.eval()
        try:
            while some := list(itertools.islice(rest, size)):
                found = self._measured(self._even(some), measure)
                yield from (found.get(number) for number in range(len(some)))
        finally:
            for part in self.parts:
                part.train()

    def _measured(self, even: Sequence[Passed], measure: Measure) -> dict[int, Tensor]:
        """The rows of each micro-batch that are this rank's to give."""
        found: dict[int, Tensor] = {}

        def rows(scorer: Scorer, number: int, inputs: Mapping[str, Tensor]) -> Tensor:
            whole, own = even[number]
            found[number] = measured(measure, scorer, own, whole, **inputs)
            return torch.zeros((), device=self.device)

        with known_documents(*(own for _, own in even)):
            self._pipeline.run(even, rows)
        return found if self.counts_rows else {}

    @property
    def counts_rows(self) -> bool:
        return super().counts_rows and self._pipeline.ends_here

    def _even(self, batches: Iterable[MicroBatch]) -> list[Passed]:
        """The micro-batches and this rank's part of each, all of one shape."""
        given = list(batches)
        even = equal_shapes(given, self._pipeline.least(len(given)))
        return [self.laid_out(one) for one in even]

    def gradient_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        repeated = None
        if self._tied is not None:
            self._tied.sum_gradients()
            repeated = self._tied.repeated
        copy = None if repeated is None else repeated.grad
        return total_norm([one for one in gradients if one is not copy], divided=True)

    def fixed_state(self) -> EngineState:
        return grouped_state(self._whole, self.plan, _named(self._whole, self.parts))

    def state(self) -> EngineState:
        own = super().state()
        trained = [name for name, one in self._whole.named_parameters() if one.requires_grad]
        elsewhere = {name: self.updates_of(name) for name in trained}
        return dataclasses.replace(own, updates=elsewhere | dict(own.updates))

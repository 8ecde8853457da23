"""Distributed data parallel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from pipeline import (
    Context,
    Engine,
    ModelSource,
    OptimizerPlan,
    PlanView,
    Precision,
    Problem,
    traits,
)
from stages.model.config_checks import config_of, declarations
from stages.wrap.axes import ContextParallel, OnAxes
from stages.wrap.axis_checks import axis_problems, types_of
from stages.wrap.types_compat import WITHOUT_GRADIENT


@dataclass(frozen=True, kw_only=True)
class Ddp(OnAxes):
    """Replicate the model on every rank and average gradients (torch DistributedDataParallel)."""

    bucket_cap_mb: Annotated[int, Gt(0)] = 25
    """Gradients are reduced in buckets of this many MiB, overlapping with backward."""

    gradient_as_bucket_view: bool = True
    """Let gradients be views of the buckets instead of copies; saves one copy of all gradients."""

    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order."""

    find_unused_parameters: bool = False
    """Search the graph every step for parameters without gradient; slow, for models that need
    it."""

    context_parallel: ContextParallel | None = None
    """Divide the tokens of every sample among ranks; null keeps each sample on one rank."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        yield from axis_problems(self, plan)
        config, models = config_of(self, plan), declarations(self, plan)
        adapted = any(isinstance(one, traits.FreezesModel) for one in models)
        if config is None or adapted or self.static_graph or self.find_unused_parameters:
            return
        for kind in WITHOUT_GRADIENT & types_of(config):  # torch waits for every gradient
            message = f"some parameters of a {kind} get no gradient from text, and gradients in "
            message += "their buckets are not averaged then"
            yield Problem(message=message, hint="set static_graph: true")

    @property
    def sums_in_buckets(self) -> bool:
        """Whether the live model sums in its buckets, as `torch_compat.sums_in_buckets` says."""
        return self.gradient_as_bucket_view and not (
            self.find_unused_parameters or self.static_graph
        )

    def run(
        self, ctx: Context, model: ModelSource, precision: Precision, optimizer: OptimizerPlan
    ) -> Engine:
        from stages.wrap.ddp_engine import build

        return build(self, ctx, model, precision, optimizer)

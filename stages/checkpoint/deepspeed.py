"""Native checkpoints of DeepSpeed engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Self

from annotated_types import Gt

from pipeline.artifacts import Checkpoints, ModelSource
from pipeline.errors import Problem
from pipeline.forecast.result import Extras
from pipeline.forecast.shapes import ModelShape, OptimizerShape
from pipeline.forecast.site import Site
from pipeline.stage import Context, PlanView, Trial
from pipeline.state.retention import Retention
from stages.wrap.zero import Zero
from stages.wrap.zero.artifact import ZeroEngine
from stages.wrap.zero.placement import ZeroPlacement


@dataclass(frozen=True, kw_only=True)
class DeepSpeedCheckpoint:
    """Save and resume in DeepSpeed's own format, each rank its own part.

    The format is Python pickles, which can run code when read: only folders that this very run
    wrote are ever read. It resumes with as many processes as saved.
    """

    every: Annotated[int, Gt(0)] | None = None
    """Steps between checkpoints; null saves at the end only."""

    keep: Annotated[int, Gt(0)] | None = 2
    """Newest checkpoints to keep; null keeps all."""

    @property
    def retention(self) -> Retention:
        """What is kept."""
        return Retention(last=self.keep)

    def check(self, plan: PlanView) -> Iterator[Problem]:
        zero = plan.find(Zero)
        if zero and zero.offload_optimizer and zero.offload_optimizer.ratio < 1:
            yield Problem(
                message="DeepSpeed does not save the optimizer state that wrap's "
                "offload_optimizer.ratio leaves on the device",
                hint="use checkpoint.sharded",
            )

    def shortened(self, trial: Trial) -> Self:
        """Saves at the end only."""
        return replace(self, every=None, keep=1)

    def run(
        self, ctx: Context, engine: ZeroEngine, model: ModelSource | None = None
    ) -> Checkpoints:
        from stages.checkpoint.deepspeed_state import DeepSpeedCheckpoints

        borrowed = frozenset(model.borrowed if model else ())
        return DeepSpeedCheckpoints(
            ctx, engine, borrowed=borrowed, every=self.every, keep=self.keep
        )

    def forecast(
        self,
        site: Site,
        model: ModelShape,
        optimizer: OptimizerShape,
        placement: ZeroPlacement,
    ) -> Extras:
        from stages.checkpoint.deepspeed_forecast import extras

        return extras(self, site, model, optimizer, placement)

    def rehearse(
        self, ctx: Context, engine: ZeroEngine, model: ModelSource | None = None
    ) -> Checkpoints:
        return self.run(ctx, engine, model)

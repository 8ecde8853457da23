"""Full tensors out of checkpoints of any format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pipeline import Checkpoints, Context, Engine, PlanView, Problem, TrainedRun, Weights, traits
from pipeline.checkpoint import Formats
from stages.average.ema import EmaAverage


def average_problems(weights: str, train: Any, plan: PlanView) -> Iterator[Problem]:
    """Yield a mistake where the average of `weights: ema` is not kept by a training."""
    engines = [*plan.producers(train, Engine)]
    kept = any(isinstance(engine, EmaAverage) for engine in engines)
    if weights == "ema" and engines and not kept:
        yield Problem(
            key="weights",
            message="this recipe's training keeps no average",
            hint="add a slot average.ema between wrap and checkpoint",
        )


@dataclass(frozen=True, kw_only=True)
class ConsolidateStream:
    """Stream full tensors out of a checkpoint of any strategy, number of processes and format:
    canonical, full, DeepSpeed's, torch.distributed.checkpoint's.

    Any range of any tensor is put together from the parts that ranks saved, while it is read;
    memory stays at a few MiB whatever the model's size. Master weights are read where there are
    any. In canonical checkpoints every byte is verified.
    """

    nothing_to_plan: ClassVar[bool] = True

    weights: Literal["model", "ema"] = "model"
    """The trained weights, or their exponential moving average, where the training kept one (slot
    `average.ema`). Frozen weights are the same in both."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        train = plan.producer(self, TrainedRun)
        yield from average_problems(self.weights, train, plan)
        stage = plan.producer(train, Checkpoints)
        if stage is not None:
            saved = stage.format if isinstance(stage, traits.NamesFormat) else None
            if saved not in Formats.installed().names():
                what = f"there is no format `{saved}`" if saved else "the stage names no `format`"
                yield Problem(
                    message=f"{type(stage).__name__}'s checkpoints cannot be read: {what}",
                    hint="docs/writing-a-stage.md says how a checkpoint stage names one",
                )

    def run(self, ctx: Context, trained: TrainedRun) -> Weights:
        from stages.consolidate.weights import open_weights

        average = None if self.weights == "model" else self.weights
        return open_weights(trained.checkpoint, verify=ctx.dist.is_main, average=average)

    def run_dry(self, ctx: Context, trained: TrainedRun) -> Weights:
        return self.run(ctx, trained)

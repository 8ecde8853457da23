"""The stage `model.trained`: the model of a training, for a further one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pipeline import Context, ModelSource, PlanView, Problem, TrainedRun
from stages.consolidate.stream import average_problems
from stages.fields import result_problems


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """Take the model of the training before, for a further training in the same recipe.

    The weights are streamed out of its checkpoint, adapters merged; nothing is written. The
    further training is the same, bit for bit, as one that starts from an export in `dtype`. The
    model slot before says how the model is built and trained (attention, activation checkpointing,
    compile), and which tokenizer it has.
    """

    dtype: Literal["fp32", "bf16", "fp16", "source"] = "bf16"
    """Dtype to which the trained weights are rounded, as `export.safetensors` does; `fp32` keeps
    master weights as they are, `source` the dtype of each tensor in the model slot."""
    weights: Literal["model", "ema"] = "model"
    """The trained weights, or their exponential moving average, where the training kept one (slot
    `average.ema`)."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        yield from average_problems(self.weights, plan.producer(self, TrainedRun), plan)
        yield from result_problems(self, plan)

    def run(self, ctx: Context, trained: TrainedRun, model: ModelSource) -> ModelSource:
        from stages.model.as_exported import open_trained_source

        average = None if self.weights == "model" else self.weights
        return open_trained_source(ctx, trained, model, self.dtype, average)

    def run_dry(self, ctx: Context, trained: TrainedRun, model: ModelSource) -> ModelSource:
        return self.run(ctx, trained, model)

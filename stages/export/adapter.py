"""The stage `export.adapter`: only the trained adapter, as peft loads it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from pipeline import Context, ExportedModel, PlanView, Problem, TrainedRun, Weights
from stages.adapter.lora import AdaptedModel
from stages.export.safetensors import ExportSettings
from stages.fields import made_by_training
from stages.model.config_checks import hf_model


@dataclass(frozen=True, kw_only=True)
class ExportAdapter(ExportSettings):
    """Write the trained adapter without the model, in peft's layout, then prove that peft loads it
    onto the model and computes the same.

    `export.safetensors` writes the model with the adapter merged into it.
    """

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype of the weights in the file. An adapter is small enough to keep the trained values."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        yield from super().check(plan)
        hint = "use export.safetensors"
        if trained := made_by_training(self, plan):
            message = f"the adapter changes the model of slot `{trained}`, which no folder holds"
            yield Problem(message=message, hint=hint)
        model = hf_model(self, plan)
        sizes = {"vocab_size": model.vocab_size, "new_weights": model.new_weights} if model else {}
        for name in filter(sizes.get, sizes):
            message = (
                f"the model slot's {name} makes another model, which others do not have to put "
                "the adapter on"
            )
            yield Problem(message=message, hint=hint)

    def run(
        self, ctx: Context, weights: Weights, model: AdaptedModel, trained: TrainedRun | None = None
    ) -> ExportedModel:
        from stages.export.contents import AdapterContents

        contents = AdapterContents(
            source=model, trained=weights, prompt=self.prompt, dtype=self.dtype
        )
        return self._export(ctx, contents, trained)

    def run_dry(
        self, ctx: Context, weights: Weights, model: AdaptedModel, trained: TrainedRun
    ) -> ExportedModel:
        return replace(self, folder=None).run(ctx, weights, model, trained)

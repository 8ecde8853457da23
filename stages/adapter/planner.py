"""Planner of `adapter.lora`."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.artifacts import ModelSource
from pipeline.planning.planner import NARROW_FROZEN, Planner, Saving
from pipeline.stage import Context
from stages.adapter.lora import Lora


class LoraPlanner(Planner[Lora]):
    """Planner of `adapter.lora`."""

    def savings(self, ranks: int) -> Iterator[Saving]:
        if self.stage.quantize is None:
            yield Saving(
                order=NARROW_FROZEN,
                what="frozen weights in 4 bits (QLoRA)",
                fields={"quantize": "nf4"},
            )

    def trace(self, ctx: Context, model: ModelSource) -> ModelSource:
        source: ModelSource = self.stage.declared(model, seed=ctx.seed)
        return source

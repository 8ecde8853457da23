"""Planner of `model.hf`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.artifacts import ModelSource
from pipeline.planning.planner import RECOMPUTE, Extent, Planner, Saving
from pipeline.planning.shapes import ModelShape
from pipeline.planning.topology import Topology
from pipeline.stage import Context
from stages.model.hf import HfModel
from stages.model.positions import stated_context
from stages.model.read import read_config

LEFT_OUT = {
    "compile": "compiled blocks keep less for backward than is counted here",
    "fp8": "copies of weights and activations in 8 bits are not counted",
    "kernels": "fused kernels keep less for backward than is counted here",
}
"""Fields -> what they do that is not followed."""


class HfPlanner(Planner[HfModel]):
    """Planner of `model.hf`."""

    def depends(self) -> Mapping[str, Any]:
        stage = self.stage
        again = stage.activation_checkpointing
        return {
            "config": read_config(stage),
            "attention": stage.attention,
            "recomputed": None if again is None else dataclasses.asdict(again),
        }

    def forecast(self, topology: Topology, model: ModelShape) -> ModelShape:
        caveats = [what for name, what in LEFT_OUT.items() if getattr(self.stage, name) is not None]
        context = stated_context(read_config(self.stage))
        return dataclasses.replace(model, context=context, caveats=(*model.caveats, *caveats))

    def savings(self, ranks: int) -> Iterator[Saving]:
        if self.stage.activation_checkpointing is None:
            yield Saving(
                order=RECOMPUTE,
                what="activations of blocks are computed again in backward",
                fields={"activation_checkpointing": {}},
            )

    def trace(self, ctx: Context, extent: Extent) -> ModelSource:
        from stages.model.declared import declared_source

        return declared_source(self.stage, ctx, extent)

"""Planner of `model.hf`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline import Context, ModelSource, StageError
from pipeline.planning import AWAY, RECOMPUTE, Planner, Saving, Topology, TraceScope, traced_backend
from stages.model.config_checks import has_experts
from stages.model.files import is_local
from stages.model.hf import Compile, HfModel
from stages.model.read import read_config

LEFT_OUT = {
    "fp8": "copies of weights and activations in 8 bits are not counted",
    "kernels": "fused kernels keep less for backward than is counted here",
}
"""Field that a plan leaves out, as it needs values or a GPU -> the effect that is not counted."""


class HfPlanner(Planner[HfModel]):
    """Planner of `model.hf`; the model is built from its config alone."""

    def depends(self) -> Mapping[str, Any]:
        return {
            "config": read_config(self.stage),
            "attention": self.stage.attention,
            "recomputed": self.stage.activation_checkpointing,
            "compiled": self.stage.compile is not None,
            "frozen": self.stage.frozen,
        }

    def forecast(self, topology: Topology) -> tuple[str, ...]:
        found = [LEFT_OUT[name] for name in LEFT_OUT if getattr(self.stage, name) is not None]
        if has_experts(read_config(self.stage)):
            found.append(
                "fused kernels for experts: transformers' own code takes longer, and that is what "
                "is expected here"
            )
        return tuple(found)

    def savings(self, ranks: int) -> Iterator[Saving]:
        if self.stage.activation_checkpointing is None:
            what = "activations of blocks are computed again in backward"
            yield Saving(order=RECOMPUTE, what=what, fields={"activation_checkpointing": {}})
        elif not self.stage.activation_checkpointing.offload:
            fields = dataclasses.asdict(self.stage.activation_checkpointing) | {"offload": True}
            what = "their inputs wait in host memory"
            yield Saving(order=AWAY, what=what, fields={"activation_checkpointing": fields})

    def trace(self, ctx: Context, scope: TraceScope) -> ModelSource:
        from stages.model.source import open_source

        left_out: dict[str, Any] = dict.fromkeys([*LEFT_OUT, "tokenizer"])
        if self.stage.attention not in ("sdpa", "eager"):  # kernels that are not on every machine
            from stages.model import planned_attention

            planned_attention.register()
            left_out["attention"] = planned_attention.NAME
        if self.stage.compile is not None:
            left_out["compile"] = Compile(backend=traced_backend(), dynamic=False)
        stage = dataclasses.replace(self.stage, init="random", **left_out)
        if stage.path is not None and not is_local(stage.path):
            config = read_config(dataclasses.replace(stage, vocab_size=None))
            stage = dataclasses.replace(stage, path=None, config=config)
        source = open_source(stage, ctx)
        if scope.blocks is not None:
            shorten(source.config.get_text_config(), scope.blocks)
        else:
            source.require_frozen()  # of fewer blocks, patterns may match none
        return source


def shorten(config: Any, blocks: int) -> None:
    """Keep the first `blocks` blocks of a config, and their part of its lists. Raises StageError
    for a config without num_hidden_layers."""
    count = getattr(config, "num_hidden_layers", None)
    if count is None:
        raise StageError(
            f"a {config.model_type} cannot be planned: its config has no num_hidden_layers",
            hint="`pipe bench` measures its memory and time",
        )
    for name, value in vars(config).items():
        if isinstance(value, list | tuple) and len(value) == count:
            setattr(config, name, value[:blocks])
    config.num_hidden_layers = blocks

"""The shape of a model with low-rank updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from pipeline.forecast.shapes import ModelShape, Update, Weight
from stages.adapter.four_bit_sizes import packed_bytes

if TYPE_CHECKING:
    from stages.adapter.lora import Lora


def adapted(stage: Lora, model: ModelShape) -> ModelShape:
    """The model's own weights frozen and borrowed, matrices of its blocks with updates."""
    caveats = list(model.caveats)
    if stage.dora:
        caveats.append("what DoRA computes of the lengths of weights' rows")
    return replace(model.changed(_change(stage)), caveats=tuple(caveats))


def _change(stage: Lora) -> Callable[[Weight], Weight]:
    def change(weight: Weight) -> Weight:
        wanted = any(fnmatchcase(weight.name, pattern) for pattern in stage.train_also)
        frozen = replace(weight, trained=wanted, borrowed=not wanted)
        if not _is_layer(weight):
            return frozen
        if stage.quantize is not None:
            frozen = replace(frozen, packed=packed_bytes(weight.elements))
        return (
            replace(frozen, update=_update(stage, weight)) if _is_target(stage, weight) else frozen
        )

    return change


def _is_layer(weight: Weight) -> bool:
    """Whether it is a linear layer's, but not the head's."""
    return len(weight.shape) == 2 and ".layers." in weight.name


def _is_target(stage: Lora, weight: Weight) -> bool:
    name = weight.name.removesuffix(".weight")
    if isinstance(stage.targets, str):
        return True
    return any(name == target or name.endswith(f".{target}") for target in stage.targets)


def _update(stage: Lora, weight: Weight) -> Update:
    outputs, inputs = weight.shape
    layer = weight.name.removesuffix(".weight")
    return Update(
        down=Weight(name=f"{layer}.lora_A", shape=(stage.rank, inputs)),
        up=Weight(name=f"{layer}.lora_B", shape=(outputs, stage.rank)),
        dropout=stage.dropout > 0,
    )

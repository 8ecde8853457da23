"""The shape of a model with low-rank updates."""

from __future__ import annotations

from collections.abc import Callable, Collection
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
    inside = {weight for block in model.blocks for weight in block.own}
    return replace(model.changed(_change(stage, inside)), caveats=tuple(caveats))


def _change(stage: Lora, inside: Collection[Weight]) -> Callable[[Weight], Weight]:
    def change(weight: Weight) -> Weight:
        wanted = any(fnmatchcase(weight.name, pattern) for pattern in stage.train_also)
        frozen = replace(weight, trained=wanted, borrowed=not wanted)
        if len(weight.shape) != 2 or weight not in inside:
            return frozen
        if stage.quantize is not None and not weight.transposed:
            frozen = replace(frozen, packed=packed_bytes(weight.elements))
        return (
            replace(frozen, update=_update(stage, weight)) if _is_target(stage, weight) else frozen
        )

    return change


def _is_target(stage: Lora, weight: Weight) -> bool:
    name = weight.name.removesuffix(".weight")
    if isinstance(stage.targets, str):
        return True
    return any(name == target or name.endswith(f".{target}") for target in stage.targets)


def _update(stage: Lora, weight: Weight) -> Update:
    outputs, inputs = weight.outputs, weight.elements // weight.outputs
    layer = weight.name.removesuffix(".weight")
    return Update(
        down=Weight(name=f"{layer}.lora_A", shape=(stage.rank, inputs)),
        up=Weight(name=f"{layer}.lora_B", shape=(outputs, stage.rank)),
        dropout=stage.dropout > 0,
    )

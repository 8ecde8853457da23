"""Matrices of a model that an adapter leaves as they are, and how to include them."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from stages.adapter.experts import stacked_weights
from stages.adapter.layers import Layer
from stages.model.block_changes import is_linear
from stages.model.declared import logical_numel

if TYPE_CHECKING:
    from torch import nn

    from stages.adapter.lora import Lora

Kind = Literal["linear", "experts", "stacked", "other"]
"""Linear layers; stacked weights of experts that can have an update; others that cannot; matrices
of modules that are no linear layers, as routers are."""


class LeftOut(NamedTuple):
    """Weights of the same place in all blocks, without an update."""

    pattern: str
    """Their names, with `*` for the number of the block."""
    parameters: int
    """Elements of all of them together."""
    kind: Kind


def left_out(model: Any, layers: Sequence[Layer]) -> list[LeftOut]:
    """The matrices of `model` that neither have an update, as `layers` do, nor are trained as a
    whole. Embeddings, the head and biases are not among them."""
    found: Counter[tuple[str, Kind]] = Counter()
    for name, parameters, kind in _matrices(model, layers):
        found[re.sub(r"\.\d+\.", ".*.", name), kind] += parameters
    return [LeftOut(pattern, count, kind) for (pattern, kind), count in found.items()]


def _matrices(model: Any, layers: Sequence[Layer]) -> Iterator[tuple[str, int, Kind]]:
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    updated = {layer.weight for layer in layers}
    experts = {name for name, _, _ in stacked_weights(model)}
    sizes = logical_numel(model)
    for owner, module in model.named_modules():
        if any(module is table for table in tables) or owner.endswith(".base_layer"):
            continue
        for leaf, weight in module.named_parameters(recurse=False):
            name = f"{owner}.{leaf}"
            if name in updated or weight.requires_grad or "bias" in leaf:
                continue
            size = sizes.get(name) or weight.numel()
            if is_linear(module):
                yield f"{owner}.weight", size, "linear"
            elif weight.ndim > 2:
                yield name, size, "experts" if name in experts else "stacked"
            elif weight.ndim == 2:
                yield name, size, "other"


def log_left_out(
    stage: Lora, model: nn.Module, layers: Sequence[Layer], log: logging.Logger
) -> None:
    """Warn of linear layers and stacked weights without an update, and say how to include them;
    routers, which are usually left as they are, are mentioned."""
    found = left_out(model, layers)
    missed = [one for one in found if one.kind != "other"]
    for kind, advice in _advice(stage, missed).items():
        of_kind = [one for one in missed if one.kind == kind]
        log.warning("%s get no update and stay as they are; %s", summary(of_kind), advice)
    rest = [one for one in found if one.kind == "other"]
    if rest:
        log.info("%s stay as they are; train_also trains them as a whole", summary(rest))


def summary(found: Sequence[LeftOut]) -> str:
    """Number of parameters and where they are."""
    total = sum(one.parameters for one in found)
    return f"{total:,} parameters of {', '.join(one.pattern for one in found)}"


def _advice(stage: Lora, missed: Sequence[LeftOut]) -> dict[Kind, str]:
    """How to include the weights of each kind that there is."""
    names: dict[Kind, list[str]] = {}
    for one in missed:
        names.setdefault(one.kind, []).append(one.pattern)
    advice: dict[Kind, str] = {}
    for kind, patterns in names.items():
        ends = sorted({pattern.rpartition(".*.")[2] for pattern in patterns})
        if kind == "linear":
            ends = [end.removesuffix(".weight") for end in ends]
            advice[kind] = f"targets: all-linear includes them, or their names {', '.join(ends)}"
        elif kind == "experts" and not stage.dora:
            advice[kind] = f"target_parameters: [{', '.join(ends)}] includes them"
        else:
            why = "DoRA has none for experts; " if kind == "experts" else ""
            patterns = [f"'*.{end}'" for end in ends]
            advice[kind] = f"{why}train_also: [{', '.join(patterns)}] trains them as a whole"
    return advice

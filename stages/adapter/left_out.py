"""Matrices of a model that an adapter leaves as they are, and how to include them."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

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


def log_left_out(
    stage: Lora, model: nn.Module, layers: Sequence[Layer], log: logging.Logger
) -> None:
    """Warn of linear layers and stacked weights without an update, and say how to include them;
    mention routers, which are usually left as they are. Embeddings, the head and biases do not
    count."""
    found: dict[Kind, Counter[str]] = {}
    for name, parameters, kind in _matrices(model, layers):
        found.setdefault(kind, Counter())[re.sub(r"\.\d+\.", ".*.", name)] += parameters
    for kind, sizes in found.items():
        what = f"{sizes.total():,} parameters of {', '.join(sizes)}"
        if kind == "other":
            log.info("%s stay as they are; train_also trains them as a whole", what)
        else:
            advice = _advice(stage, kind, sizes)
            log.warning("%s get no update and stay as they are; %s", what, advice)


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


def _advice(stage: Lora, kind: Kind, patterns: Iterable[str]) -> str:
    """How to include the weights of a kind."""
    ends = sorted({pattern.rpartition(".*.")[2] for pattern in patterns})
    if kind == "linear":
        names = ", ".join(end.removesuffix(".weight") for end in ends)
        return f"targets: all-linear includes them, or their names {names}"
    if kind == "experts" and not stage.dora:
        return f"target_parameters: [{', '.join(ends)}] includes them"
    why = "DoRA has none for experts; " if kind == "experts" else ""
    named = ", ".join(f"'*.{end}'" for end in ends)
    return f"{why}train_also: [{named}] trains them as a whole"

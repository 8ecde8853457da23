"""Linear layers as plans of tensor parallelism see them: styles, sizes, heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from torch import nn

from stages.wrap.axes import Style

COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise")
ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise")
SUMMED = "replicated_with_grad_allreduce"
STYLES = (*get_args(Style), "colwise_rep", "rowwise_rep")
HEAD_SIZES = ("head_dim", "head_size")
"""Attributes under which attention modules keep the width of a head."""


def transposed(module: nn.Module) -> bool:
    """Whether the weight is (inputs, outputs), as GPT-2's layers keep it."""
    return type(module).__name__ == "Conv1D"


def layer_sizes(module: Any) -> tuple[int, int] | None:
    """Inputs and outputs of a linear layer, with or without an update; None for other modules."""
    if transposed(module):
        inputs, outputs = module.weight.shape
        return inputs, outputs
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return int(module.in_features), int(module.out_features)
    return None


def shared_heads(model: nn.Module, styles: Mapping[str, str], size: int) -> dict[str, int]:
    """Key and value layers with so few heads that ranks share one."""
    found = {}
    for name, style in styles.items():
        heads = heads_of(model, name) if style == "colwise" else None
        if heads and heads < size and size % heads == 0 and name.endswith(("k_proj", "v_proj")):
            found[name] = heads
    return found


def heads_of(model: nn.Module, name: str) -> int | None:
    """Number of attention heads that a layer computes; None for other layers."""
    owner, _, leaf = name.rpartition(".")
    parent = model.get_submodule(owner)
    width = next((getattr(parent, key) for key in HEAD_SIZES if hasattr(parent, key)), None)
    outputs = getattr(getattr(parent, leaf), "out_features", None)  # a parameter has none
    return None if width is None or outputs is None else int(outputs) // int(width)

"""Undocumented parts of transformers' experts, in one place; contract tests guard them.

The experts of a layer are one module with tensors of all experts. Whether they are gated,
transposed or biased is written into it by the decorator that lets implementations be chosen.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def is_experts(module: nn.Module) -> bool:
    """Whether the module holds all experts of a layer, and says how they are laid out."""
    said = ("is_transposed", "is_concatenated", "has_gate", "has_bias", "has_post_expert_norm")
    return all(hasattr(module, name) for name in said) and hasattr(module, "num_experts")


def full_shape(weight: Tensor) -> tuple[int, ...]:
    """Shape of a parameter, also if ZeRO has partitioned it."""
    return tuple(getattr(weight, "ds_shape", weight.shape))


def first_projection(experts: Any) -> str:
    """Name of the tensor that the inputs are multiplied by."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def activate(experts: Any, projected: Tensor) -> Tensor:
    """The inputs of the second projection from the outputs of the first."""
    activated: Tensor = (
        experts._apply_gate(projected) if experts.has_gate else experts.act_fn(projected)
    )
    return activated


def computes_eagerly(experts: Any) -> bool:
    """Whether the model was told to compute its experts by plain operations, one by one."""
    return bool(experts.config._experts_implementation == "eager")


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Products of groups of rows, each with its matrix: shapes (rows, inputs), (groups, inputs,
    outputs), and (groups,) of int32 with the end of each group."""
    from transformers.integrations.moe import _grouped_mm

    product: Tensor = _grouped_mm(rows, weights, ends)
    return product

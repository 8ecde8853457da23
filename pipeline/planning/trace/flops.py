"""Floating-point operations of an operation on tensors, by torch's own formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

ATTENTION, PRODUCTS = "attention", "products"
KEPT = 4 / 5
"""Share of the products of an attention kernel's backward that are no repetition of forward."""


def operations(
    function: Any, arguments: Sequence[Any], named: Mapping[str, Any], out: Any
) -> tuple[str, float]:
    """What kind of arithmetic an operation is, and how much: `attention` for fused kernels, half of
    it where they are causal; `products` of matrices; nothing for all else."""
    packet = function._overloadpacket
    aten = torch.ops.aten
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        amount = sdpa_flop_count(*(one.shape for one in arguments[:3]))  # type: ignore[no-untyped-call]
        return ATTENTION, amount * _seen(function, arguments, named)
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        amount = KEPT * sdpa_backward_flop_count(*(one.shape for one in arguments[:4]))  # type: ignore[no-untyped-call]
        return ATTENTION, amount * _seen(function, arguments, named)
    if packet is aten._grouped_mm:
        # Rows of the first, each multiplied with a matrix of its group; or gradients of those.
        return PRODUCTS, 2.0 * math.prod(arguments[0].shape) * arguments[1].shape[-1]
    formula = flop_registry.get(packet)
    if formula is None:
        return PRODUCTS, 0.0
    kind = ATTENTION if "attention" in str(packet) else PRODUCTS
    return kind, float(formula(*arguments, **named, out_val=out))


def _seen(function: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> float:
    """Share of the pairs of tokens that a kernel looks at."""
    names = [argument.name for argument in function._schema.arguments]
    given = dict(zip(names, arguments, strict=False)) | dict(named)
    return 0.5 if given.get("is_causal") else 1.0

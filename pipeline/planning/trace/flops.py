"""Floating-point operations of an operation on tensors, by torch's own formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten
ATTENTION, PRODUCTS = "attention", "products"
KEPT = 4 / 5
"""Share of the products of an attention kernel's backward that are no repetition of forward."""
CPU_KERNELS: dict[Any, tuple[Any, int, float]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: (sdpa_flop_count, 3, 1.0),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (sdpa_backward_flop_count, 4, KEPT),
}
"""Kernel -> formula, the number of tensors whose shapes it takes, and the share that counts."""


def operations(
    function: Any, arguments: Sequence[Any], named: Mapping[str, Any], out: Any
) -> tuple[str, float]:
    """What kind of arithmetic an operation is, and how much: `attention` for fused kernels, half of
    it where they are causal; `products` of matrices; nothing for all else."""
    packet = function._overloadpacket
    if packet in CPU_KERNELS:
        formula, tensors, share = CPU_KERNELS[packet]
        names = [argument.name for argument in function._schema.arguments]
        causal = (dict(zip(names, arguments, strict=False)) | dict(named)).get("is_causal")
        amount = formula(*(one.shape for one in arguments[:tensors]))
        return ATTENTION, amount * share * (0.5 if causal else 1.0)
    if packet is aten._grouped_mm:
        # Rows of the first, each multiplied with a matrix of its group; or gradients of those.
        return PRODUCTS, 2.0 * math.prod(arguments[0].shape) * arguments[1].shape[-1]
    counted = flop_registry.get(packet)
    if counted is None:
        return PRODUCTS, 0.0
    kind = ATTENTION if "attention" in str(packet) else PRODUCTS
    return kind, float(counted(*arguments, **named, out_val=out))

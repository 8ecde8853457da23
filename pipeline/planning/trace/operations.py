"""Floating-point operations of functions of torch, counted from the shapes of their tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten
ATTENTION, PRODUCTS = "attention", "products"
KEPT = 4 / 5
"""Share of the products of an attention kernel's backward that do not repeat forward."""
CPU_KERNELS: dict[Any, tuple[Any, int, float]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: (sdpa_flop_count, 3, 1.0),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (sdpa_backward_flop_count, 4, KEPT),
}
"""Kernel -> formula, the number of tensors whose shapes it takes, and the share that counts."""


def operations(
    function: Any, arguments: Sequence[Any], named: Mapping[str, Any], out: Any
) -> tuple[str, float]:
    """ATTENTION for fused kernels, else PRODUCTS, with the floating-point operations of the
    function: half where attention is causal, none for anything but products of matrices."""
    packet = function._overloadpacket
    if packet in CPU_KERNELS:
        formula, tensors, share = CPU_KERNELS[packet]
        names = [argument.name for argument in function._schema.arguments]
        causal = (dict(zip(names, arguments, strict=False)) | dict(named)).get("is_causal")
        amount = formula(*_with_own_heads([one.shape for one in arguments[:tensors]]))
        return ATTENTION, amount * share * (0.5 if causal else 1.0)
    if packet is aten._grouped_mm:
        # Each row of the first is multiplied with its group's matrix; or gradients of that.
        return PRODUCTS, 2.0 * math.prod(arguments[0].shape) * arguments[1].shape[-1]
    counted = flop_registry.get(packet)
    if counted is None:
        return PRODUCTS, 0.0
    kind = ATTENTION if "attention" in str(packet) else PRODUCTS
    return kind, float(counted(*arguments, **named, out_val=out))


def _with_own_heads(shapes: Sequence[torch.Size]) -> list[torch.Size]:
    """Shapes (samples, heads, tokens, size) of attention, with as many heads of keys and values as
    of queries, which the first has: the work is the same, and torch 2.11 counts no other."""
    return [torch.Size((shape[0], shapes[0][1], *shape[2:])) for shape in shapes]

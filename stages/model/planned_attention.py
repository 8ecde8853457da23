"""A stand-in for fused attention in plans, which have neither its GPU nor values to run it on."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "planned_fused_attention"
"""Attention implementation of transformers."""


def register() -> None:
    """Make transformers know the stand-in, which needs no mask."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **given: Any
) -> tuple[Tensor, None]:
    """Causal attention of (batch, heads, tokens, size) as (batch, tokens, heads, size)."""
    out = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=given.get("scaling"),
        enable_gqa=key.shape[1] != query.shape[1],
    )  # fmt: skip
    sinks = given.get("s_aux")
    if sinks is not None:  # a weight of each head, which gets a gradient and keeps nothing
        out = out + sinks.to(out.dtype).reshape(1, -1, 1, 1)
    return out.transpose(1, 2).contiguous(), None


def _no_mask(*_: Any, **__: Any) -> None:
    return None

"""Rotary tables that depend on how long a text is, by a model's config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LENGTHWISE = ("longrope", "dynamic")
"""LongRoPE (Ding et al. 2024), which has one table for texts up to a length and one for longer
ones, and dynamic NTK scaling, which has one for each length beyond the model's positions."""
OLD_NAME = "su"
"""What configs called LongRoPE before."""


def lengthwise_kind(config: Mapping[str, Any], *, of_rope: bool = False) -> str | None:
    """The kind of rotary tables of a config.json that depend on the length of a text; None if it
    has no such tables. `of_rope`: it is the part of a config about them."""
    kind = config.get("rope_type", config.get("type"))
    if of_rope and kind in (*LENGTHWISE, OLD_NAME):
        return str(kind)
    parts = ((key, value) for key, value in config.items() if isinstance(value, Mapping))
    found = (lengthwise_kind(value, of_rope=of_rope or "rope" in key) for key, value in parts)
    return next((one for one in found if one is not None), None)


OF_THE_BATCH = ("deepseek_v4",)
"""Types that ask for angles at positions of their own, which follow from the padded length."""


def other_angles(config: Mapping[str, Any], *, of_transformers: bool) -> tuple[str, str] | None:
    """Message and hint about a model, by its config.json, whose angles depend on other rows than a
    token's own, as its code is not `of_transformers` say; None for one whose do not."""
    kind = lengthwise_kind(config)
    if kind is None or (of_transformers and config.get("model_type") not in OF_THE_BATCH):
        return None
    message = f"its rotary tables are of kind {kind}, and depend on the longest row of a batch"
    hint = "train another model" if of_transformers else "leave out trust_remote_code"
    return f"{message} in its code", hint

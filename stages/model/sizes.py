"""Sizes in a model's config that no model can have. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MOST = 2**31 - 1
"""The largest size of anything: what is larger is a slip, and would be no size of memory."""
MOST_BLOCKS = 1024
"""More than any model has (1000: Wang et al. 2022, DeepNet)."""
_SIZE = re.compile(r"(num|n)_.+|.*(size|_dim|_rank|_embeddings|_positions|_layers|_heads|d_model)")
_BLOCKS = ("num_hidden_layers", "n_layer", "n_layers")
_NEVER_0 = (
    "hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "n_embd", "n_head", "n_positions", "d_model",
)  # fmt: skip


def wrong_size(config: Mapping[str, Any]) -> str:
    """The first size that cannot be, in words, also in the configs of a model's parts; empty when
    all can."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            told = wrong_size(value)
            if told:
                return f"{key}.{told}"
        elif type(value) is int and _SIZE.fullmatch(str(key)):
            least = 1 if key in _NEVER_0 else 0
            most = MOST_BLOCKS if key in _BLOCKS else MOST
            if not least <= value <= most:
                return f"{key} is {value:.4g}, expected a whole number from {least} to {most}"
    return ""

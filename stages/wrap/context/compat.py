"""Names of transformers that build attention masks and choose attention functions.

Masks are made by the model from the length of its input, and whether documents are packed from
positions. Both see a slice of the sequence under context parallelism, while attention sees all of
it. So an implementation of attention is registered for each group of ranks, together with a mask
function that knows the whole sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def implementation(model: Any) -> str:
    """The attention implementation that the model has chosen."""
    return str(model.config.get_text_config()._attn_implementation)


def install(model: Any, name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Register functions for attention and masks, and let the model's language part use them."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    # Not through `set_attn_implementation`: it guesses from names what they demand.
    for config in (model.config, model.config.get_text_config()):
        config._attn_implementation_internal = name


def mask_function(implementation: str) -> Callable[..., Any] | None:
    """The function that makes masks for an implementation; None if there is none."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    found: Callable[..., Any] | None = ALL_MASK_ATTENTION_FUNCTIONS.get(implementation)
    return found


def attention_function(implementation: str, module: nn.Module) -> Callable[..., Any]:
    """The attention function of an implementation; the eager one is in the module's file."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    found: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
    return found


def within_documents(pattern: Callable[..., Any], positions: Tensor) -> Callable[..., Any] | None:
    """A mask's `pattern` within each document, by positions in it; None if every sample is one
    document."""
    from transformers import masking_utils

    numbers = masking_utils.find_packed_sequence_indices(positions)
    within = masking_utils.packed_sequence_compatibility_function
    return None if numbers is None else within(pattern, positions, numbers)


def reason_not_divisible(model: Any) -> str:
    """Why a model cannot be context-parallel: something other than attention functions lets tokens
    see each other. Empty if nothing does."""
    config = model.config.get_text_config()
    known = {"full_attention", "sliding_attention", "chunked_attention"}
    others = sorted(set(getattr(config, "layer_types", None) or ()) - known)
    if others:
        return f"has layers of kind {', '.join(others)}"
    if model._is_stateful:
        return "keeps a state along the sequence"
    if not model._supports_attention_backend:
        return "computes attention by itself"
    if getattr(config, "alibi", False):
        return "adds biases by distance to attention"
    return ""

"""A small model of each family that is described as data."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 2000, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
EAGER = {"attention": "eager"}

SMALL: dict[str, dict[str, Any]] = {
    "phi3": {"config": {"model_type": "phi3", "pad_token_id": 0, **SIZES}},
    "gemma2": {
        "config": {"model_type": "gemma2", "head_dim": 48, "sliding_window": 32, **SIZES},
        **EAGER,
    },
    "gemma3_text": {
        "config": {"model_type": "gemma3_text", "head_dim": 48, "sliding_window": 32, **SIZES},
    },
    "olmo2": {"config": {"model_type": "olmo2", **SIZES}},
    "granite": {"config": {"model_type": "granite", **SIZES, "residual_multiplier": 0.2}},
    "gpt2": {
        "config": {
            "model_type": "gpt2", "vocab_size": 2000, "n_embd": 128, "n_layer": 4, "n_head": 4,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        },
    },
    "gpt_neox": {
        "config": {
            "model_type": "gpt_neox",
            **{key: size for key, size in SIZES.items() if key != "num_key_value_heads"},
        },
    },
}  # fmt: skip
"""`model_type` -> fields of `model.hf`."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3, part of heads turned": ("phi3", {"partial_rotary_factor": 0.5}),
    "phi3, tied, a window": ("phi3", {"tie_word_embeddings": True, "sliding_window": 32}),
    "gemma2, no caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3_text, biases, listed": (
        "gemma3_text",
        {
            "attention_bias": True,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text, keys of one head": ("gemma3_text", {"num_key_value_heads": 1}),
    "granite, biases": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "gpt2, another activation": (
        "gpt2",
        {"activation_function": "gelu", "n_inner": 96, "tie_word_embeddings": False},
    ),
    "gpt_neox, one after another": (
        "gpt_neox",
        {"use_parallel_residual": False, "rotary_pct": 1.0, "attention_bias": False},
    ),
}
"""Name -> family, and what its config says besides."""


def fields(name: str) -> dict[str, Any]:
    """Fields of `model.hf` of a family, or of a variant."""
    family, more = VARIANTS.get(name, (name, {}))
    small = SMALL[family]
    return {**small, "config": {**small["config"], **more}}

"""A small config of each causal language model of the installed transformers."""

from __future__ import annotations

from typing import Any

from pipeline.errors import StageError

SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "lru_width"), 128),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "encoder_ffn_dim",
         "decoder_ffn_dim"), 256,
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 96),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers",
         "decoder_layers"), 4,
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads",
         "decoder_attention_heads"), 4,
    ),
    "num_key_value_heads": 2,
    "head_dim": 32,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 32, "n_group": 1, "topk_group": 1,
    **dict.fromkeys(("state_size", "mamba_d_state"), 8),
    "max_position_embeddings": 256, "sliding_window": 32, "cross_attention_layers": [1],
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Small values by name of a size in configs."""
NEEDED = (
    "num_experts_per_tok", "n_routed_experts", "n_shared_experts", "num_key_value_heads",
    "num_attention_heads", "hidden_size",
)  # fmt: skip
"""Sizes for configs whose default is None, with which no model can be built."""

OWN: dict[str, dict[str, Any]] = {
    "zaya": {"num_experts_per_tok": 1},
    "codegen": {"rotary_dim": 16},
    "gptj": {"rotary_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
}
"""Further sizes that a model type needs."""


def every() -> list[str]:
    """Return the types of causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small(kind: str, *, dropout: bool = True) -> dict[str, Any]:
    """Return the default config of a type, with small sizes; without `dropout`, with none."""
    from transformers import CONFIG_MAPPING

    try:
        found = _small(CONFIG_MAPPING[kind]().to_dict(), dropout=dropout)
    except Exception as error:  # of a type that does not accept its own default config
        raise StageError(f"the default config cannot be made: {error}") from error
    return {"model_type": kind, **found, **OWN.get(kind, {})}


def _small(default: dict[str, Any], *, dropout: bool) -> dict[str, Any]:
    found = {
        name: size
        for name, size in SIZES.items()
        if name in default and (default[name] is not None or name in NEEDED)
    }
    if "kv_lora_rank" in default:  # keys of every head, of which a part is rotated
        found |= {"num_key_value_heads": 4} | ({"head_dim": 16} if "head_dim" in default else {})
    count = default.get("num_hidden_layers")
    found |= {
        name: value[:4]
        for name, value in default.items()
        if isinstance(value, list) and count and len(value) == count
    }
    if isinstance(default.get("text_config"), dict):
        found["text_config"] = _small(default["text_config"], dropout=dropout)
    if not dropout:
        found |= {
            name: 0.0
            for name, value in default.items()
            if "drop" in name and isinstance(value, float)
        }
    return found

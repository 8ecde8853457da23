"""Tiny mixtures of experts. Grouped products need sizes that are multiples of 4 in fp32."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FOUR = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

MOE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**SIZES, **FOUR, "num_experts": 5},
    "mixtral": {**SIZES, "num_local_experts": 3, "num_experts_per_tok": 2},
    "olmoe": {**SIZES, "head_dim": 6, "num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "deepseek_v3": {
        **SIZES, **FOUR, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4,
        "head_dim": 4,
    },
}  # fmt: skip
"""Config of one tiny model of each family; deepseek_v3's first block is dense, and its others also
have an expert for every token."""
MOE = {kind: {"model_type": kind, **sizes} for kind, sizes in MOE.items()}


def attention_of(config: dict[str, Any]) -> str:
    """Return the attention implementation that an architecture has on CPUs."""
    return "eager" if config["model_type"] == "gpt_oss" else "sdpa"

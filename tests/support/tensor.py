"""Tiny models of families that tensor parallelism divides differently."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
GPT2_PLAN = {
    "transformer.wte": "embedding_rowwise",
    "transformer.h.*.attn.c_attn": "colwise_gather_output",
    "transformer.h.*.attn.c_proj": "rowwise_split_input",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
    "lm_head": "colwise",
}
"""A plan for a family that brings none: attention's first layer holds three matrices."""


def sized(kind: str, **changes: Any) -> dict[str, Any]:
    """Return the config of a tiny model."""
    return {**SIZES, "model_type": kind, **changes}


FAMILIES: dict[str, dict[str, Any]] = {
    "llama with biases": sized("llama", attention_bias=True, mlp_bias=True),
    "llama, tied": sized("llama", tie_word_embeddings=True),
    "qwen2": sized("qwen2"),
    "qwen3": sized("qwen3"),
    "mistral": sized("mistral"),
    "gemma2": sized("gemma2", query_pre_attn_scalar=8),
    "gemma3": sized("gemma3_text", query_pre_attn_scalar=8),
    "phi3": sized("phi3"),
    "olmo2": sized("olmo2"),
    "granite": sized("granite"),
    "mixtral": sized("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "gpt2": GPT2,
}

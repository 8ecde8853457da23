"""OLMo 2 (OLMo Team 2024): norms behind attention and MLP, of all queries and keys, in fp32."""

from __future__ import annotations

from stages.model.shapes.attention import Rotary
from stages.model.shapes.decoder import Branch, DecoderBlock, DecoderModel
from stages.model.shapes.family import (
    Family,
    Given,
    attention_apart,
    decoder,
    gated_mlp,
)
from stages.model.shapes.norms import WideRmsNorm


def shape(given: Given) -> DecoderModel:
    """The shape of a model."""
    rotary = Rotary(size=given.size, wide=True)

    def block(number: int, place: str) -> DecoderBlock:
        queries, keys = given.heads * given.size, given.keys * given.size
        attention = attention_apart(
            given,
            place,
            rotary,
            norms=(
                WideRmsNorm.named(f"{place}.self_attn.q_norm", queries),
                WideRmsNorm.named(f"{place}.self_attn.k_norm", keys),
            ),
        )
        first = WideRmsNorm.named(f"{place}.post_attention_layernorm", given.hidden)
        second = WideRmsNorm.named(f"{place}.post_feedforward_layernorm", given.hidden)
        return DecoderBlock(
            attention=Branch(inner=attention, behind=first),
            mlp=Branch(inner=gated_mlp(given, place), behind=second),
        )

    return decoder(given, block, WideRmsNorm, [rotary])


OLMO2 = Family(
    defaults={
        "vocab_size": 50304, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None,
        "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0,
    },
    shape=shape,
)  # fmt: skip

"""Granite 3 (Granite Team 2024): a Llama with constants before and behind everything."""

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
from stages.model.shapes.norms import RmsNorm


def shape(given: Given) -> DecoderModel:
    """The shape of a model."""
    rotary = Rotary(size=given.size)

    def block(number: int, place: str) -> DecoderBlock:
        first = RmsNorm.named(f"{place}.input_layernorm", given.hidden)
        second = RmsNorm.named(f"{place}.post_attention_layernorm", given.hidden)
        attention = attention_apart(given, place, rotary)
        return DecoderBlock(
            attention=Branch(inner=attention, before=first, scaled=True),
            mlp=Branch(inner=gated_mlp(given, place), before=second, scaled=True),
        )

    return decoder(given, block, RmsNorm, [rotary], scaled=True, logits_scaled=True)


GRANITE = Family(
    defaults={
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None,
        "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0,
        "mlp_bias": False,
    },
    shape=shape,
)  # fmt: skip

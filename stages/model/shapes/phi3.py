"""Phi-3 and Phi-4 (Abdin et al. 2024): queries, keys and values as one matrix, gate and up too."""

from __future__ import annotations

from stages.model.shapes.attention import Attention, Eager, Fused
from stages.model.shapes.decoder import Branch, DecoderBlock, DecoderModel
from stages.model.shapes.family import SHARE, Family, Given, decoder
from stages.model.shapes.linear import linear
from stages.model.shapes.mlp import FusedMlp
from stages.model.shapes.norms import RmsNorm


def shape(given: Given) -> DecoderModel:
    """The shape of a model."""
    rotary = given.rotary(SHARE)

    def block(number: int, place: str) -> DecoderBlock:
        hidden, inner = given.hidden, given.fields.count("intermediate_size")
        queries, keys = given.heads * given.size, given.keys * given.size
        attention = Attention(
            projections=Fused(
                qkv=linear(f"{place}.self_attn.qkv_proj", queries + 2 * keys, hidden),
                widths=(queries, keys, keys),
                joined=False,
            ),
            out=linear(f"{place}.self_attn.o_proj", hidden, queries),
            heads=given.heads,
            rotary=rotary,
            eager=Eager() if given.eager else None,
            window=given.fields.count_or_none("sliding_window"),
            dropout=given.fields.number("attention_dropout") > 0,
        )
        mlp = FusedMlp(
            both=linear(f"{place}.mlp.gate_up_proj", 2 * inner, hidden),
            down=linear(f"{place}.mlp.down_proj", hidden, inner),
        )
        dropout = given.fields.number("resid_pdrop") > 0
        first = RmsNorm.named(f"{place}.input_layernorm", hidden)
        second = RmsNorm.named(f"{place}.post_attention_layernorm", hidden)
        return DecoderBlock(
            attention=Branch(inner=attention, before=first, dropout=dropout),
            mlp=Branch(inner=mlp, before=second, dropout=dropout),
        )

    return decoder(given, block, RmsNorm, [rotary])


PHI3 = Family(
    defaults={
        "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None,
        "resid_pdrop": 0.0, "attention_dropout": 0.0, "tie_word_embeddings": False,
        "sliding_window": None, "rope_parameters": None, "rope_scaling": None, SHARE: 1.0,
    },
    shape=shape,
)  # fmt: skip

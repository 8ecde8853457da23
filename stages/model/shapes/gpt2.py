"""GPT-2 (Radford et al. 2019): learned positions, layer norms, matrices as (inputs, outputs)."""

from __future__ import annotations

from pipeline.forecast.shapes import Weight
from stages.model.shapes.attention import Attention, Eager, Fused
from stages.model.shapes.decoder import Branch, DecoderBlock, DecoderModel
from stages.model.shapes.family import Family, Given, Names, decoder
from stages.model.shapes.linear import transposed
from stages.model.shapes.mlp import PlainMlp
from stages.model.shapes.norms import LayerNorm

COMPOSED = ("gelu_new",)
"""Activations that are written as one operation after another."""


def shape(given: Given) -> DecoderModel:
    """The shape of a model."""
    fields, hidden = given.fields, given.hidden
    inner = fields.count_or_none("n_inner") or 4 * hidden
    dropout = fields.number("resid_pdrop") > 0

    def block(number: int, place: str) -> DecoderBlock:
        attention = Attention(
            projections=Fused(
                qkv=transposed(f"{place}.attn.c_attn", 3 * hidden, hidden),
                widths=(hidden, hidden, hidden),
                joined=True,
            ),
            out=transposed(f"{place}.attn.c_proj", hidden, hidden),
            heads=given.heads,
            rotary=None,
            eager=Eager(wide=False) if given.eager else None,
            dropout=fields.number("attn_pdrop") > 0,
        )
        mlp = PlainMlp(
            up=transposed(f"{place}.mlp.c_fc", inner, hidden),
            down=transposed(f"{place}.mlp.c_proj", hidden, inner),
            composed=fields.word("activation_function") in COMPOSED,
        )
        first = LayerNorm.named(f"{place}.ln_1", hidden)
        second = LayerNorm.named(f"{place}.ln_2", hidden)
        return DecoderBlock(
            attention=Branch(inner=attention, before=first, dropout=dropout),
            mlp=Branch(inner=mlp, before=second, dropout=dropout),
        )

    rows = fields.count("max_position_embeddings")
    return decoder(
        given,
        block,
        LayerNorm,
        names=Names("transformer.wte", "transformer.h", "transformer.ln_f"),
        positions=Weight(name="transformer.wpe.weight", shape=(rows, hidden)),
        dropout=fields.number("embd_pdrop") > 0,
    )


GPT2 = Family(
    defaults={
        "vocab_size": 50257, "max_position_embeddings": 1024, "hidden_size": 768,
        "num_hidden_layers": 12, "num_attention_heads": 12, "n_inner": None,
        "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1,
        "attn_pdrop": 0.1, "tie_word_embeddings": True,
    },
    shape=shape,
    unknown=("add_cross_attention", "reorder_and_upcast_attn"),
    spelled={
        "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings", "intermediate_size": "n_inner",
    },
)  # fmt: skip

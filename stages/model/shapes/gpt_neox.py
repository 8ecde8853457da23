"""GPT-NeoX and Pythia (Black et al. 2022): attention and MLP of the same stream."""

from __future__ import annotations

from stages.model.shapes.attention import Attention, Eager, Fused
from stages.model.shapes.decoder import Branch, DecoderBlock, DecoderModel
from stages.model.shapes.family import Family, Given, Names, decoder
from stages.model.shapes.linear import linear
from stages.model.shapes.mlp import PlainMlp
from stages.model.shapes.norms import LayerNorm


def shape(given: Given) -> DecoderModel:
    """The shape of a model."""
    fields, hidden = given.fields, given.hidden
    inner = fields.count("intermediate_size")
    rotary = given.rotary("rotary_pct")
    dropout = fields.number("hidden_dropout") > 0
    bias = fields.flag("attention_bias")

    def block(number: int, place: str) -> DecoderBlock:
        attention = Attention(
            projections=Fused(
                qkv=linear(f"{place}.attention.query_key_value", 3 * hidden, hidden, bias=bias),
                widths=(hidden, hidden, hidden),
                joined=True,
            ),
            out=linear(f"{place}.attention.dense", hidden, hidden, bias=bias),
            heads=given.heads,
            rotary=rotary,
            eager=Eager() if given.eager else None,
            dropout=fields.number("attention_dropout") > 0,
        )
        mlp = PlainMlp(
            up=linear(f"{place}.mlp.dense_h_to_4h", inner, hidden, bias=True),
            down=linear(f"{place}.mlp.dense_4h_to_h", hidden, inner, bias=True),
        )
        first = LayerNorm.named(f"{place}.input_layernorm", hidden)
        second = LayerNorm.named(f"{place}.post_attention_layernorm", hidden)
        return DecoderBlock(
            attention=Branch(inner=attention, before=first, dropout=dropout),
            mlp=Branch(inner=mlp, before=second, dropout=dropout),
            parallel=fields.flag("use_parallel_residual"),
        )

    names = Names("gpt_neox.embed_in", "gpt_neox.layers", "gpt_neox.final_layer_norm")
    return decoder(given, block, LayerNorm, [rotary], names=names, dropout=dropout)


GPT_NEOX = Family(
    defaults={
        "vocab_size": 50432, "hidden_size": 6144, "intermediate_size": 24576,
        "num_hidden_layers": 44, "num_attention_heads": 64, "tie_word_embeddings": False,
        "use_parallel_residual": True, "attention_bias": True, "attention_dropout": 0.0,
        "hidden_dropout": 0.0, "rope_parameters": None, "rope_scaling": None, "rotary_pct": 0.25,
    },
    shape=shape,
)  # fmt: skip

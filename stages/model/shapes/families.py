"""From an architecture's config to its sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pipeline.errors import StageError
from pipeline.forecast.shapes import ModelShape, Recomputed, Weight
from stages.model.shapes.catalogue import FAMILIES
from stages.model.shapes.family import Given
from stages.model.shapes.fields import MOST_BLOCKS, Fields
from stages.model.shapes.gated import GatedBlock, GatedModel

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None,
        "head_dim": None, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
    },
    "mistral": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": None, "tie_word_embeddings": False, "sliding_window": 4096,
    },
    "qwen2": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "head_dim": None, "tie_word_embeddings": False,
    },
    "qwen3": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "head_dim": 128, "tie_word_embeddings": False, "attention_bias": False,
    },
}  # fmt: skip
"""`model_type` -> what transformers' config class takes for keys that are left out."""


def shape_of(
    config: Mapping[str, Any],
    recomputed: Recomputed | None,
    caveats: tuple[str, ...],
    *,
    attention: str = "sdpa",
) -> ModelShape:
    """The sizes of a model; `attention` is how that is computed. Raises StageError for an
    architecture that has no arithmetic here, and for a config that no model can have."""
    if config.get("model_type") is None:
        raise StageError("the model's config has no model_type", hint="such as llama")
    kind = str(config["model_type"])
    if kind in FAMILIES:
        family = FAMILIES[kind]
        given = Given(
            kind=kind,
            fields=family.fields(kind, config),
            attention=attention,
            recomputed=recomputed,
            caveats=caveats,
        )
        return family.shape(given)
    if kind not in DEFAULTS:
        raise StageError(
            f"the sizes of a {kind} are not known by arithmetic",
            hint=f"it knows {', '.join([*DEFAULTS, *FAMILIES])}; --trace runs any model without "
            "memory",
        )
    fields = Fields(kind, config, DEFAULTS[kind])
    hidden, vocabulary = fields.count("hidden_size"), fields.count("vocab_size")
    table = Weight(name="model.embed_tokens.weight", shape=(vocabulary, hidden))
    norm = Weight(name="model.norm.weight", shape=(hidden,))
    head = table
    if not fields.flag("tie_word_embeddings"):
        head = Weight(name="lm_head.weight", shape=(vocabulary, hidden))
    heads = fields.count("num_attention_heads")
    size = fields.count_or_none("head_dim")
    if size is None:
        size = fields.multiple("hidden_size", "num_attention_heads", heads)
    return GatedModel(
        kind=kind,
        hidden=hidden,
        vocabulary=vocabulary,
        root=(table, norm) if head is table else (table, norm, head),
        blocks=[
            replace(
                _block(f"model.layers.{place}", kind, fields, heads, size),
                eager=attention == "eager",
            )
            for place in range(fields.count("num_hidden_layers", MOST_BLOCKS))
        ],
        attention=heads * size,
        recomputed=recomputed,
        caveats=caveats,
        table=table,
        norm=norm,
        head=head,
        rotary=size,
    )


def _block(place: str, kind: str, fields: Fields, heads: int, size: int) -> GatedBlock:
    hidden, inner = fields.count("hidden_size"), fields.count("intermediate_size")
    queries = heads * size
    sharing = fields.count_or_none("num_key_value_heads") or heads
    fields.multiple("num_attention_heads", "num_key_value_heads", sharing)
    keys = sharing * size
    biased = _BIASED[kind](fields)

    def matrix(name: str, *shape: int) -> Weight:
        return Weight(name=f"{place}.{name}.weight", shape=shape)

    def bias(name: str, width: int, wanted: bool) -> Weight | None:
        name = f"{place}.{name}.bias"
        return Weight(name=name, shape=(width,)) if wanted else None

    widths = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": hidden}
    offsets = [bias(f"self_attn.{n}", width, n in biased) for n, width in widths.items()]
    mlp = fields.flag("mlp_bias")
    return GatedBlock(
        heads=heads,
        q=matrix("self_attn.q_proj", queries, hidden),
        k=matrix("self_attn.k_proj", keys, hidden),
        v=matrix("self_attn.v_proj", keys, hidden),
        o=matrix("self_attn.o_proj", hidden, queries),
        gate=matrix("mlp.gate_proj", inner, hidden),
        up=matrix("mlp.up_proj", inner, hidden),
        down=matrix("mlp.down_proj", hidden, inner),
        norms=(matrix("input_layernorm", hidden), matrix("post_attention_layernorm", hidden)),
        offsets=(offsets[0], offsets[1], offsets[2], offsets[3]),
        inner_offsets=(
            bias("mlp.gate_proj", inner, mlp),
            bias("mlp.up_proj", inner, mlp),
            bias("mlp.down_proj", hidden, mlp),
        ),
        window=fields.count_or_none("sliding_window"),
        head_norms=_head_norms(kind, matrix, size),
    )


def _head_norms(
    kind: str, vector: Callable[[str, int], Weight], size: int
) -> tuple[Weight, Weight] | None:
    if kind != "qwen3":
        return None
    return vector("self_attn.q_norm", size), vector("self_attn.k_norm", size)


def _never(fields: Fields) -> frozenset[str]:
    return frozenset()


def _on_request(fields: Fields) -> frozenset[str]:
    wanted = fields.flag("attention_bias")
    return frozenset({"q_proj", "k_proj", "v_proj", "o_proj"} if wanted else ())


def _always(fields: Fields) -> frozenset[str]:
    return frozenset({"q_proj", "k_proj", "v_proj"})


_BIASED: Mapping[str, Callable[[Fields], frozenset[str]]] = {
    "llama": _on_request,
    "mistral": _never,
    "qwen2": _always,
    "qwen3": _on_request,
}
"""Which layers of attention have a bias."""

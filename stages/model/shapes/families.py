"""From an architecture's config to its sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipeline.errors import StageError
from pipeline.forecast.shapes import Recomputed, Weight
from stages.model.shapes.gated import GatedBlock, GatedModel

Config = Mapping[str, Any]
WINDOW = "sliding_window"
"""Key whose null is no default."""

DEFAULTS: Mapping[str, Config] = {
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
        "tie_word_embeddings": False,
    },
    "qwen3": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "head_dim": 128, "tie_word_embeddings": False, "attention_bias": False,
    },
}  # fmt: skip
"""`model_type` -> what transformers' config class takes for keys that are left out."""


def shape_of(config: Config, recomputed: Recomputed | None, caveats: tuple[str, ...]) -> GatedModel:
    """The sizes of a model. Raises StageError for an architecture that has no arithmetic here."""
    kind = str(config.get("model_type"))
    if kind not in DEFAULTS:
        raise StageError(
            f"the sizes of a {kind} are not known by arithmetic",
            hint=f"it knows {', '.join(DEFAULTS)}; --trace runs any model without memory",
        )
    given = {key: value for key, value in config.items() if value is not None or key == WINDOW}
    full = {**DEFAULTS[kind], **given}
    hidden, vocabulary = int(full["hidden_size"]), int(full["vocab_size"])
    table = Weight(name="model.embed_tokens.weight", shape=(vocabulary, hidden))
    norm = Weight(name="model.norm.weight", shape=(hidden,))
    head = table
    if not full["tie_word_embeddings"]:
        head = Weight(name="lm_head.weight", shape=(vocabulary, hidden))
    heads = int(full["num_attention_heads"])
    size = int(full.get("head_dim") or hidden // heads)
    return GatedModel(
        kind=kind,
        hidden=hidden,
        vocabulary=vocabulary,
        root=(table, norm) if head is table else (table, norm, head),
        blocks=[
            _block(f"model.layers.{place}", kind, full, heads, size)
            for place in range(int(full["num_hidden_layers"]))
        ],
        attention=heads * size,
        recomputed=recomputed,
        caveats=caveats,
        table=table,
        norm=norm,
        head=head,
        rotary=size,
    )


def _block(place: str, kind: str, config: Config, heads: int, size: int) -> GatedBlock:
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    queries = heads * size
    keys = int(config["num_key_value_heads"] or heads) * size
    biased = _BIASED.get(kind, _never)(config)

    def matrix(name: str, *shape: int) -> Weight:
        return Weight(name=f"{place}.{name}.weight", shape=shape)

    def bias(name: str, width: int, wanted: bool) -> Weight | None:
        name = f"{place}.{name}.bias"
        return Weight(name=name, shape=(width,)) if wanted else None

    widths = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": hidden}
    offsets = [bias(f"self_attn.{n}", width, n in biased) for n, width in widths.items()]
    mlp = bool(config.get("mlp_bias"))
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
        window=config.get(WINDOW) if kind == "mistral" else None,
        head_norms=_head_norms(kind, matrix, size),
    )


def _head_norms(
    kind: str, vector: Callable[[str, int], Weight], size: int
) -> tuple[Weight, Weight] | None:
    if kind != "qwen3":
        return None
    return vector("self_attn.q_norm", size), vector("self_attn.k_norm", size)


def _never(config: Config) -> frozenset[str]:
    return frozenset()


def _on_request(config: Config) -> frozenset[str]:
    wanted = bool(config.get("attention_bias"))
    return frozenset({"q_proj", "k_proj", "v_proj", "o_proj"} if wanted else ())


def _always(config: Config) -> frozenset[str]:
    return frozenset({"q_proj", "k_proj", "v_proj"})


_BIASED: Mapping[str, Callable[[Config], frozenset[str]]] = {
    "llama": _on_request,
    "qwen2": _always,
    "qwen3": _on_request,
}
"""Which layers of attention have a bias."""

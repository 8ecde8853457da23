"""What a family of architectures is: defaults of its config, and how it becomes a shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipeline.errors import StageError
from pipeline.forecast.shapes import Recomputed, Weight
from stages.model.shapes.attention import Apart, Attention, Eager, Rotary
from stages.model.shapes.decoder import DecoderBlock, DecoderModel
from stages.model.shapes.fields import MOST_BLOCKS, Fields
from stages.model.shapes.linear import linear
from stages.model.shapes.mlp import GatedMlp
from stages.model.shapes.norms import Norm

SHARE = "partial_rotary_factor"


@dataclass(frozen=True, kw_only=True)
class Given:
    """What is declared of a model."""

    kind: str
    fields: Fields
    attention: str
    """As `model.hf` calls it."""
    recomputed: Recomputed | None
    caveats: tuple[str, ...]

    @property
    def eager(self) -> bool:
        """Whether attention holds its matrix."""
        return self.attention == "eager"

    @property
    def hidden(self) -> int:
        return self.fields.count("hidden_size")

    @property
    def blocks(self) -> int:
        return self.fields.count("num_hidden_layers", MOST_BLOCKS)

    @property
    def heads(self) -> int:
        return self.fields.count("num_attention_heads")

    @property
    def keys(self) -> int:
        """Heads of keys and of values."""
        shared = self.fields.count_or_none("num_key_value_heads") or self.heads
        self.fields.multiple("num_attention_heads", "num_key_value_heads", shared)
        return shared

    @property
    def size(self) -> int:
        """Of a head."""
        given = self.fields.count_or_none("head_dim")
        return given or self.fields.multiple("hidden_size", "num_attention_heads", self.heads)

    def rotary(self, share: str) -> Rotary:
        """Of a part of each head: the field of that name, unless the positions' own say it."""
        tables = (self.fields.table(name) for name in ("rope_scaling", "rope_parameters"))
        said = next((table[SHARE] for table in tables if SHARE in table), None)
        turned = int(self.size * (self.fields.number(share) if said is None else said))
        return Rotary(size=turned, share=turned / self.size)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Of architectures."""

    defaults: Mapping[str, Any]
    """What transformers' config class takes for keys that are left out."""
    shape: Callable[[Given], DecoderModel]
    """Raises StageError for a config that no model can have."""
    spelled: Mapping[str, str] = field(default_factory=dict)
    """How a config may spell a field -> the name that it has in `defaults`."""

    unknown: tuple[str, ...] = ()
    """Fields that must not be true, for this arithmetic does not know what they change."""

    def fields(self, kind: str, config: Mapping[str, Any]) -> Fields:
        """Of a config, by the names that they have in `defaults`. Raises StageError for one that is
        not known."""
        for name in self.unknown:
            if config.get(name):
                raise StageError(
                    f"the sizes of a {kind} with {name} are not known by arithmetic",
                    hint="--trace runs any model without memory",
                )
        named = {self.spelled.get(key, key): value for key, value in config.items()}
        return Fields(kind, named, self.defaults)


class Names(NamedTuple):
    """What a model's modules are called."""

    table: str = "model.embed_tokens"
    blocks: str = "model.layers"
    norm: str = "model.norm"


def decoder(
    given: Given,
    block: Callable[[int, str], DecoderBlock],
    norm: type[Norm],
    angles: Sequence[Rotary] = (),
    *,
    names: Names = Names(),  # noqa: B008 (it cannot be changed)
    positions: Weight | None = None,
    **more: Any,
) -> DecoderModel:
    """A model; `block` is given each block's number and name, `more` are fields of the shape."""
    fields, hidden = given.fields, given.hidden
    vocabulary = fields.count("vocab_size")
    table = Weight(name=f"{names.table}.weight", shape=(vocabulary, hidden))
    last = norm.named(names.norm, hidden)
    head = table
    if not fields.flag("tie_word_embeddings"):
        head = Weight(name="lm_head.weight", shape=(vocabulary, hidden))
    tables = (table,) if positions is None else (table, positions)
    blocks = [block(place, f"{names.blocks}.{place}") for place in range(given.blocks)]
    return DecoderModel(
        kind=given.kind,
        hidden=hidden,
        vocabulary=vocabulary,
        root=tuple(dict.fromkeys((*tables, *last.own, head))),
        blocks=blocks,
        attention=given.heads * given.size,
        recomputed=given.recomputed,
        caveats=given.caveats,
        table=table,
        positions=positions,
        norm=last,
        head=head,
        angles=tuple(angles),
        **more,
    )


def attention_apart(given: Given, place: str, rotary: Rotary, **more: Any) -> Attention:
    """Attention whose queries, keys and values are layers each; `more` are its fields."""
    hidden, name = given.hidden, f"{place}.self_attn"
    queries, keys = given.heads * given.size, given.keys * given.size
    bias = given.fields.flag("attention_bias")
    return Attention(
        projections=Apart(
            q=linear(f"{name}.q_proj", queries, hidden, bias=bias),
            k=linear(f"{name}.k_proj", keys, hidden, bias=bias),
            v=linear(f"{name}.v_proj", keys, hidden, bias=bias),
        ),
        out=linear(f"{name}.o_proj", hidden, queries, bias=bias),
        heads=given.heads,
        rotary=rotary,
        dropout=given.fields.number("attention_dropout") > 0,
        **{"eager": Eager() if given.eager else None, **more},
    )


def gated_mlp(given: Given, place: str) -> GatedMlp:
    """An MLP with a gate."""
    hidden, inner = given.hidden, given.fields.count("intermediate_size")
    bias = given.fields.flag("mlp_bias")
    return GatedMlp(
        gate=linear(f"{place}.mlp.gate_proj", inner, hidden, bias=bias),
        up=linear(f"{place}.mlp.up_proj", inner, hidden, bias=bias),
        down=linear(f"{place}.mlp.down_proj", hidden, inner, bias=bias),
    )

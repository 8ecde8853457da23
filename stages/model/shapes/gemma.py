"""Gemma 2 and Gemma 3 (Gemma Team 2024, 2025): norms before and behind, windows in some blocks."""

from __future__ import annotations

from functools import partial

from pipeline.errors import StageError
from stages.model.shapes.attention import Eager, Rotary
from stages.model.shapes.decoder import Branch, DecoderBlock, DecoderModel
from stages.model.shapes.family import (
    Family,
    Given,
    attention_apart,
    decoder,
    gated_mlp,
)
from stages.model.shapes.norms import WideRmsNorm

FULL, SLIDING = "full_attention", "sliding_attention"
BOTH_WAYS = ("use_bidirectional_attention",)


def gemma2(given: Given) -> DecoderModel:
    """The shape of a Gemma 2."""
    if given.attention == "sdpa":
        raise StageError(
            "a gemma2 has no attention: sdpa, which cannot bound products",
            hint="write eager (pipe advise: --attention eager)",
        )
    return _shape(given, every=2, head_norms=False, rotary=[Rotary(size=given.size)])


def gemma3(given: Given) -> DecoderModel:
    """The shape of the text model of a Gemma 3."""
    kinds = {*_kinds(given, every := given.fields.count("sliding_window_pattern"))}
    rotary = [Rotary(size=given.size) for _ in kinds]  # each has its own angles
    return _shape(given, every=every, head_norms=True, rotary=rotary)


def _shape(given: Given, *, every: int, head_norms: bool, rotary: list[Rotary]) -> DecoderModel:
    fields, kinds = given.fields, _kinds(given, every)
    window = fields.count_or_none("sliding_window")
    eager = Eager(capped=fields.given("attn_logit_softcapping") and not head_norms)

    def block(number: int, place: str) -> DecoderBlock:
        of_heads = [WideRmsNorm.named(f"{place}.self_attn.{n}_norm", given.size) for n in "qk"]
        norm = partial(_norm, given, place)
        attention = attention_apart(
            given,
            place,
            rotary[0],
            norms=(of_heads[0], of_heads[1]) if head_norms else None,
            window=window if kinds[number] == SLIDING else None,
            eager=eager if given.eager else None,
        )
        return DecoderBlock(
            attention=Branch(inner=attention, before=norm("input"), behind=norm("post_attention")),
            mlp=Branch(
                inner=gated_mlp(given, place),
                before=norm("pre_feedforward"),
                behind=norm("post_feedforward"),
            ),
        )

    return decoder(
        given,
        block,
        WideRmsNorm,
        rotary,
        scaled=True,
        logits_capped=fields.given("final_logit_softcapping"),
    )


def _norm(given: Given, place: str, name: str) -> WideRmsNorm:
    return WideRmsNorm.named(f"{place}.{name}_layernorm", given.hidden)


def _kinds(given: Given, every: int) -> list[str]:
    """What each block's attention is; without a list, all have windows but every so many."""
    listed = given.fields.choices("layer_types", given.blocks, (FULL, SLIDING))
    return listed or [SLIDING if (n + 1) % every else FULL for n in range(given.blocks)]


_SHARED = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "tie_word_embeddings": True, "attention_bias": False, "attention_dropout": 0.0,
    "sliding_window": 4096, "layer_types": None,
}  # fmt: skip
GEMMA2 = Family(
    defaults={
        **_SHARED, "vocab_size": 256000, "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    shape=gemma2,
    unknown=BOTH_WAYS,
)  # fmt: skip
GEMMA3 = Family(
    defaults={
        **_SHARED, "vocab_size": 262208, "final_logit_softcapping": None,
        "attn_logit_softcapping": None, "sliding_window_pattern": 6,
    },
    shape=gemma3,
    unknown=BOTH_WAYS,
)  # fmt: skip

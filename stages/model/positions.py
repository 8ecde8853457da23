"""Are samples longer than the model's positions? Told from the config, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any

from pipeline.errors import Problem
from pipeline.stage import PlanView
from stages.model.read import config_at_hand

if TYPE_CHECKING:
    from stages.model.hf import HfModel

TABLES = {
    "biogpt": 1024, "codegen": 2048, "ctrl": 256, "gpt2": 1024, "gpt_bigcode": 1024,
    "gpt_neo": 2048, "gptj": 2048, "openai-gpt": 512, "opt": 2048,
}  # fmt: skip
"""Kinds of models that look positions up in a table, in which those beyond it are not -> how many
there are where a config does not say."""


def too_long(stage: HfModel, plan: PlanView) -> Iterator[Problem]:
    """A problem where a slot's samples may be longer than the model's positions: a mistake where
    positions are rows of a table, else a warning."""
    config = config_at_hand(stage) or {}
    kind = config.get("model_type")
    context = stated_context(config)
    if context is None:
        context = TABLES.get(str(kind))
    if context is None:
        return
    for slot, other in plan.slots.items():
        length = getattr(other, "sequence_length", None)
        if not isinstance(length, int) or length <= context:
            continue
        samples = f"samples of slot `{slot}` may have {length} tokens"
        if kind in TABLES:
            yield Problem(
                message=f"{samples}, and a {kind} with {context} positions fails on longer ones",
                hint=f"set {slot}.sequence_length to {context} or less",
            )
        else:
            yield Problem(
                message=f"{samples}, and the model's config states {context} positions",
                hint=f"lower {slot}.sequence_length, or give the model a config that scales its "
                "rotary angles",
                warning=True,
            )


def stated_context(config: Mapping[str, Any]) -> int | None:
    """Positions that a config states, with those that scaling its rotary angles adds."""
    stated = config.get("max_position_embeddings", config.get("n_positions"))
    if type(stated) is not int or stated < 1:
        return None
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(scaling, Mapping):
        return stated
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if not isinstance(factor, int | float) or not isfinite(factor):
        return stated
    return max(stated, int(factor * (original if type(original) is int else stated)))

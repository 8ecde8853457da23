"""Are samples longer than the model's positions? Told from the config, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeline.errors import Problem
from pipeline.stage import PlanView
from stages.model.shapes.declared import stated_context
from stages.model.shapes.families import DEFAULTS
from stages.model.shapes.read import config_at_hand

if TYPE_CHECKING:
    from stages.model.hf import HfModel

TABLES = {
    *("biogpt", "codegen", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "openai-gpt", "opt"),
}
"""Kinds of models that look positions up in a table, in which those beyond it are not."""


def too_long(stage: HfModel, plan: PlanView) -> Iterator[Problem]:
    """A problem where a slot's samples may be longer than the model's positions: a mistake where
    positions are rows of a table, else a warning."""
    config = config_at_hand(stage) or {}
    kind = config.get("model_type")
    context = stated_context(config)
    if context is None and kind in TABLES:
        context = stated_context(DEFAULTS.get(str(kind), {}))
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

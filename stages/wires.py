"""Artifacts of one training that come from slots of another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline import Checkpoints, Engine, ModelSource, OptimizerPlan, PlanView, Problem, traits


def mixed_problems(stage: Any, plan: PlanView) -> Iterator[Problem]:
    """Yield a model or an optimizer that a stage gets and that its engine was not built from, an
    engine that trains nothing, and checkpoints that save another engine. An adapter after the wrap
    slot is a mistake of its own slot."""
    wires, slot = plan.wiring, plan.slot(stage)
    for wrap in [*wires.producers(slot, Engine)][-1:]:
        built, own = wires.producer(wrap, ModelSource), wires.producer(slot, ModelSource)
        if built and own and built not in wires.producers(slot, ModelSource):
            yield Problem(
                message=f"gets the model of slot `{own}`, but its engine, slot `{wrap}`, was built "
                f"from slot `{built}`",
                hint=f"write `takes: {{model: {built}}}` in this slot",
            )
        rules, own = wires.producer(wrap, OptimizerPlan), wires.producer(slot, OptimizerPlan)
        optimizer = plan.slots.get(rules or "")
        nothing = isinstance(optimizer, traits.DeclaresRules) and not optimizer.update_rules()
        if own and nothing:
            yield Problem(
                message=f"trains the engine of slot `{wrap}`, whose optimizer, slot `{rules}`, "
                "trains nothing",
                hint=f"put an optimizer slot before slot `{wrap}`, or another wrap slot after it",
            )
        elif rules and own and rules != own:
            yield Problem(
                message=f"gets the optimizer of slot `{own}`, but its engine, slot `{wrap}`, was "
                f"built with slot `{rules}`",
                hint=f"write `takes: {{optimizer: {rules}}}` in this slot",
            )
        saving = wires.producer(slot, Checkpoints)
        for saved in [*wires.producers(saving or "", Engine)][-1:]:
            if saved != wrap:
                yield Problem(
                    message=f"trains the engine of slot `{wrap}`, but slot `{saving}` saves the "
                    f"engine of slot `{saved}`",
                    hint=f"write `takes: {{engine: {wrap}}}` in slot `{saving}`, or another slot "
                    "that returns an engine here",
                )

"""Artifacts of one training that come from slots of another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline import (
    Checkpoints,
    Engine,
    ModelSource,
    OptimizerPlan,
    PlanView,
    Problem,
    TrainedRun,
    Weights,
    traits,
)


def result_problems(stage: Any, plan: PlanView) -> Iterator[Problem]:
    """Yield a record or model that a stage gets from another training than its weights."""
    wires, slot = plan.wiring, plan.slot(stage)
    weights = wires.producer(slot, Weights)
    own = wires.producer(slot, TrainedRun)
    read = wires.producer(weights, TrainedRun) if weights else own
    if own and read and own != read:
        yield Problem(
            message=f"gets the training of slot `{own}`, but the weights of slot `{weights}` are "
            f"from slot `{read}`",
            hint=f"write `takes: {{trained: {read}}}` in this slot, or in slot `{weights}` "
            f"`takes: {{trained: {own}}}`",
        )
        return
    model, then = wires.producer(slot, ModelSource), wires.producer(read or "", ModelSource)
    if model and then and model != then:
        yield Problem(
            message=f"gets the model of slot `{model}`, but slot `{read}` trained the one of slot "
            f"`{then}`",
            hint=f"write `takes: {{model: {then}}}` in this slot",
        )


def made_by_training(stage: Any, plan: PlanView) -> str | None:
    """The training that made the model that a stage gets; None for a model of files."""
    first = [*_of_one_training(plan, plan.slot(stage))][-1:]
    return plan.wiring.producer(first[0], TrainedRun) if first else None


def _of_one_training(plan: PlanView, slot: str) -> Iterator[str]:
    """The slots whose models a slot gets, changed one by another, since the training before."""
    wires = plan.wiring
    for one in wires.producers(slot, ModelSource):
        yield one
        if wires.producer(one, TrainedRun):
            return


def mixed_problems(stage: Any, plan: PlanView) -> Iterator[Problem]:
    """Yield a model or an optimizer that a stage gets and that its engine was not built from, an
    engine that trains nothing, and checkpoints that save another engine. An adapter after the wrap
    slot is a mistake of the adapter's slot."""
    wires, slot = plan.wiring, plan.slot(stage)
    for wrap in [*wires.producers(slot, Engine)][-1:]:
        built, own = wires.producer(wrap, ModelSource), wires.producer(slot, ModelSource)
        if built and own and built not in _of_one_training(plan, slot):
            yield Problem(
                message=f"gets the model of slot `{own}`, but its engine, slot `{wrap}`, was built "
                f"from slot `{built}`",
                hint=f"write `takes: {{model: {built}}}` in this slot, or in slot `{wrap}` "
                f"`takes: {{model: {own}}}`",
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

"""Artifacts of one training that come from slots of another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline import Checkpoints, Engine, ModelSource, PlanView, Problem


def mixed_problems(stage: Any, plan: PlanView) -> Iterator[Problem]:
    """Yield a model that a stage gets and that its engine was not built from, and checkpoints that
    save another engine. An adapter after the wrap slot is a mistake of its own slot."""
    wires, slot = plan.wiring, plan.slot(stage)
    for wrap in [*wires.producers(slot, Engine)][-1:]:
        built, own = wires.producer(wrap, ModelSource), wires.producer(slot, ModelSource)
        if built and own and built not in wires.producers(slot, ModelSource):
            yield Problem(
                message=f"gets the model of slot `{own}`, but its engine, slot `{wrap}`, was built "
                f"from slot `{built}`",
                hint=f"write `takes: {{model: {built}}}` in this slot",
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

"""Files whose settings accelerate only hands on, to an engine that another wrap stage knows.

`pipe import` translates such a file; the stage that it names for the wrap slot is built and asked
instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.contracts.optimizer import OptimizerPlan
from pipeline.contracts.precision import Precision
from pipeline.contracts.stage import PlanView
from pipeline.errors import Location, Problem
from pipeline.importing.files import read_config
from pipeline.importing.translator import KeyOutcome, Request, choose, installed_translators
from pipeline.plan.registry import Registry
from pipeline.recipe.fields import build
from pipeline.recipe.nodes import SourceMap

SHARED = {"optimizer": OptimizerPlan, "precision": Precision}
"""Slots of the recipe that such a file has opinions on, too."""


class HandedOn:
    """What a file means. `stage` is None when its keys cannot be those of a wrap stage."""

    def __init__(self, path: Path, key: str) -> None:
        self._key = key
        file = read_config(path)
        translation = choose([file], installed_translators()).translate([file], Request())
        self._outcomes = translation.outcomes
        self.stage: Any = None
        self._wrong: list[Problem] = []
        if translation.recipe is not None:
            fields = dict(translation.recipe["stages"]["wrap"])
            self.use = str(fields.pop("use"))
            kind = Registry.installed().load(self.use)
            marks = SourceMap(keys={}, values={(): Location(file=file.path.name)}, data=fields)
            self.stage, self._wrong = build(kind, fields, marks=marks, path=())

    def problems(self, plan: PlanView) -> Iterator[Problem]:
        """What the recipe cannot have, or says otherwise; all at `key`."""
        for outcome in self._outcomes:
            if outcome.left_out:
                why = outcome.why or "is not translated"
                yield self._problem(f"{outcome.key} in {outcome.file}: {why}", outcome.hint)
            else:
                yield from self._contradictions(outcome, plan)
        checked = self.stage.check(plan) if hasattr(self.stage, "check") else ()
        for problem in (*self._wrong, *checked):
            yield self._problem(f"as {self.use}, {problem.key}: {problem.message}", problem.hint)

    def _contradictions(self, outcome: KeyOutcome, plan: PlanView) -> Iterator[Problem]:
        for name, value in outcome.to.items() if outcome.value != "auto" else ():
            slot, _, field = name.partition(".")
            for other in plan.giving(SHARED[slot]) if slot in SHARED else ():
                own = getattr(other, field, value)
                if not _same(own, value):
                    yield self._problem(
                        f"{outcome.key} in {outcome.file} is {outcome.value!r}, but the recipe's "
                        f"{slot} has {field}: {own!r}",
                        "say the same in both",
                    )

    def _problem(self, message: str, hint: str) -> Problem:
        return Problem(key=self._key, message=message, hint=hint)


def _same(own: Any, value: Any) -> bool:
    return bool((list(own) if isinstance(own, tuple) else own) == value)

"""The part of a chain that a start of a run is to do: `--from`, `--until`, `--only`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.chain.commits import resolved
from pipeline.errors import UsageError
from pipeline.execution import rundir
from pipeline.execution.journal import Journal
from pipeline.execution.resume import plan_resume
from pipeline.utils.text import align, did_you_mean, plural

if TYPE_CHECKING:
    from pipeline.chain.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Slots that a person has named. None: no restriction."""

    first: str | None = None
    """Run this slot and all later slots again, finished or not."""
    last: str | None = None
    """End after this slot."""
    only: str | None = None
    """Run this slot, finished or not, and end after it; before it, what has not finished."""

    def __post_init__(self) -> None:
        """Raise UsageError for slots that exclude each other."""
        if self.only is not None and (self.first or self.last):
            raise UsageError("--only excludes --from and --until")

    def again(self, plan: Plan) -> list[str]:
        """Return the slots that are to run even if they have finished. Raises UsageError for a slot
        that the plan does not have, and for a range that has none."""
        order = [step.slot for step in plan.steps]
        for slot in filter(None, (self.first, self.last, self.only)):
            _require(slot, order)
        if self.only is not None:
            return [self.only]
        if self.first is None:
            return []
        if self.last and order.index(self.first) > order.index(self.last):
            raise UsageError(f"--from {self.first} comes after --until {self.last}")
        return order[order.index(self.first) :]

    def of(self, plan: Plan) -> Plan:
        """Return the part of the plan that is to be done."""
        return plan.until(self.only or self.last)

    def set_aside(self, plan: Plan, journal: Journal) -> None:
        """Note in the journal which of the slots that have finished are to run again. Raises as
        `again` does."""
        known = journal.state().finished
        for slot in self.again(plan):
            if slot in known:
                journal.write("slot set aside", slot=slot)


def _require(slot: str, order: list[str]) -> None:
    if slot not in order:
        raise UsageError(f"the recipe has no slot `{slot}`", hint=did_you_mean(slot, order))


def ends_early(plan: Plan) -> str | None:
    """Return the slot after which a start under a plan ends, if others follow in the recipe."""
    last = plan.steps[-1].slot
    return None if last == list(plan.recipe.stages)[-1] else last


def rehearsal(plan: Plan, folder: Path | None, selection: Selection) -> Iterator[str]:
    """Yield lines for people: each slot, whether it would run, and why not. `folder` is the run's,
    if it has one already. Raises UsageError for a slot that the plan does not have."""
    journal = Journal((folder or Path("a run that is not there")) / rundir.JOURNAL)
    plan = resolved(plan, journal.state().commits, ask=False)
    chosen = selection.of(plan)
    todo = plan_resume(chosen, journal, thorough=False, again=selection.again(plan))
    view = plan.view
    yield f"{plan.recipe.name}: {plural(view.procs, 'process')}, {view.device}"
    rows = []
    for step in plan.steps:
        if step.slot in todo.run:
            what = "would run"
        elif step not in chosen.steps:
            what = "is left out"
        else:
            what = "has finished"
        rows.append((step.slot, step.use, what))
    yield from align(rows, left=3)
    yield "nothing was started"

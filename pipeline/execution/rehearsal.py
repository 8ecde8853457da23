"""A dry run: lines that say what a start of a run would do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.chain.names import resolved
from pipeline.execution import rundir
from pipeline.execution.journal import Journal
from pipeline.execution.resume import plan_resume
from pipeline.execution.selection import Selection
from pipeline.utils.text import align, plural

if TYPE_CHECKING:
    from pipeline.chain.plan import Plan


def rehearsal(plan: Plan, folder: Path | None, selection: Selection) -> Iterator[str]:
    """Yield lines for people: each slot, whether it would run, and why not. `folder` is the run's,
    if it has one already. Raises UsageError for a slot that the plan does not have."""
    journal = Journal((folder or Path("a run that is not there")) / rundir.JOURNAL)
    plan = resolved(plan, journal.commits(), ask=False)
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

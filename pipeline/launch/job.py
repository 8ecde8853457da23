"""A run to start, or to continue, as a command asks for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.chain.plan import Plan, resolved
from pipeline.distributed.launch import LaunchInfo
from pipeline.execution import rundir
from pipeline.execution.journal import Journal
from pipeline.execution.resume import Selection
from pipeline.utils.terminal import typed
from pipeline.view.display import Display

Beside = Callable[[Plan, Path], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to start, or to continue with."""

    plan: Callable[[LaunchInfo], Plan]
    """Makes the plan for what a launcher has started."""
    folder: Callable[[Plan], Path]
    """Makes or finds the run's folder; called once in the whole run."""
    display: Display
    accept: tuple[str, ...] = ()
    """Changes that are intended."""
    selection: Selection = field(default_factory=Selection)
    beside: Beside = lambda plan, folder: nullcontext()
    """Surrounds the run with what else this machine does for it meanwhile."""
    begun: Path | None = None
    """The run's folder, where it may be there already."""

    def planned(self, given: LaunchInfo) -> Plan:
        """Return the plan, in which names of the hub have the commits that they had when the run
        began, or have now. Raises RecipeError, and what `plan` raises."""
        plan = self.plan(given)
        known = Journal(self.begun / rundir.JOURNAL).state().commits if self.begun else {}
        return resolved(plan, known)

    def prepared(self, plan: Plan, folder: Path) -> Plan:
        """Return the part of the plan that this start does, in a folder whose lock this process
        has."""
        typed(str(folder))
        self.selection.set_aside(plan, Journal(folder / rundir.JOURNAL))
        return self.selection.of(plan)

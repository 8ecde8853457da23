"""Start a run in its folder: as the launching process, or as one rank under another launcher."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.chain.names import resolved
from pipeline.chain.plan import Plan, PlannedSlot, Started
from pipeline.contracts.training import TrainedRun
from pipeline.distributed.environment import STOPPED, is_worker, started, worker_rank
from pipeline.distributed.launchers import placement
from pipeline.distributed.placement import (
    NodeOptions,
    NodePlacement,
    Placement,
    RankPlacement,
    combined,
)
from pipeline.distributed.schedulers import require_task
from pipeline.distributed.signals import Interrupted, LastWords, default_signals, stoppable
from pipeline.errors import (
    CommandStopped,
    JournalDamaged,
    PipeError,
    RunStopped,
    UsageError,
    in_words,
    system_errors_as,
)
from pipeline.execution import activity_record, failures, rundir
from pipeline.execution.journal import Journal
from pipeline.execution.metrics import saved_step
from pipeline.execution.origins import write_origins
from pipeline.execution.rank_logging import say
from pipeline.execution.resume import finished_in, plan_resume, results
from pipeline.execution.selection import Selection, cut, ends_early
from pipeline.launch import undo
from pipeline.utils.files import replace_text
from pipeline.utils.terminal import hide_environment, shown, typed
from pipeline.utils.text import align, duration, shown_path
from pipeline.view.ending import next_lines, outcome
from pipeline.view.history import RunState
from pipeline.view.screen import Display

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


Beside = Callable[[Plan, Path], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to start, or to go on with."""

    plan: Callable[[Started], Plan]
    """Makes the plan for what a launcher has started."""
    folder: Callable[[Plan], Path]
    """Makes or finds the run's folder; called once in the whole run."""
    display: Display
    accept: Sequence[str] = ()
    """Changes that are intended."""
    selection: Selection = field(default_factory=Selection)
    beside: Beside = lambda plan, folder: nullcontext()
    """Surrounds the run with what else this machine does for it meanwhile."""
    begun: Path | None = None
    """The run's folder, where it may be there already."""

    def planned(self, given: Started) -> Plan:
        """Return the plan, in which names of the hub have the commits that they had when the run
        began, or have now. Raises RecipeError, and what `plan` raises."""
        plan = self.plan(given)
        known = Journal(self.begun / rundir.JOURNAL).commits() if self.begun else {}
        return resolved(plan, known)

    def prepared(self, plan: Plan, folder: Path) -> Plan:
        """Return the part of the plan that this start does, in a folder whose lock is held."""
        typed(str(folder))
        self.selection.set_aside(plan, Journal(folder / rundir.JOURNAL))
        return cut(plan)


FOLDER_KEY = "pipe/folder"
"""Key under which rank 0 publishes the run's folder; an empty text when there is nothing to do."""


REPORT_SECONDS = 5.0
"""Seconds that the report of a stopped run may take: who has stopped it waits for the exit code."""


def start(job: Job, options: NodeOptions | None = None) -> None:
    """Run what is not done yet: all of it on this machine, one node's part of it, or one rank's,
    as the `options` and the environment say.

    Raises what the job's parts raise, RunLocked, RunFailed, RunStopped, and UsageError where the
    environment or the options contradict themselves.
    """
    hide_environment()
    job.selection.announce()
    found = combined(options or NodeOptions(), placement(os.environ))
    if found is None:
        require_task(os.environ)
    if isinstance(found, RankPlacement):
        os.environ |= found.environment()
    if worker_rank() > 0:
        _follow(job)
        return
    # torchrun waits 30 s for a rank that it stops; a rank can be in a collective that never ends.
    try:
        with stoppable(force_after=3.0 if is_worker() else None):
            _start(job, found)
    except CommandStopped as stopped:  # before there was anything to go on with
        raise RunStopped(str(stopped)) from None
    finally:
        if is_worker():  # libraries may hang in native code at the end, where Python handles none
            default_signals()


def _start(job: Job, found: Placement | None) -> None:
    if is_worker():
        _lead(job)
    elif isinstance(found, NodePlacement) and found.max_nodes > 1:
        from pipeline.launch.node import start_node

        start_node(job, found)
    else:
        _start_here(job, found.procs if isinstance(found, NodePlacement) else None)


def _start_here(job: Job, procs: int | None) -> None:
    plan = job.planned(Started(per_node=procs))
    folder = job.folder(plan)
    with rundir.locked(folder):
        plan = job.prepared(plan, folder)
        if is_done(plan, folder):
            return
        from pipeline.launch.local import launch

        with (
            job.display.to_the_end(),
            opened(plan, folder),
            job.beside(plan, folder),
            job.display.shown(plan, folder) as screen,
        ):
            launch(plan, folder, job.accept, screen)


def _lead(job: Job) -> None:
    """Rank 0 under another launcher: it prepares the run, prints, and holds the lock."""
    plan = job.planned(started())
    folder = job.folder(plan)
    with rundir.locked(folder):
        plan = job.prepared(plan, folder)
        store = _meet()
        if is_done(plan, folder):
            _publish(store, "")
            return
        with opened(plan, folder):
            _publish(store, str(folder))
            _run_as_rank(folder, store, job.accept)


def _follow(job: Job) -> None:
    """Another rank: it learns from rank 0 where the run is, and need not see the recipe."""
    from pipeline.distributed.process_group import receive

    default_signals()
    store = _meet()
    folder = receive(store, FOLDER_KEY)
    store.add(f"{FOLDER_KEY}/received", 1)
    if folder:
        _run_as_rank(Path(folder), store, job.accept)


def _meet() -> Store:
    from pipeline.distributed.process_group import environment_store
    from pipeline.utils.process_tree import die_with

    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's own death must not leave this rank behind
        die_with(os.getppid())
    store = environment_store()
    assert store is not None
    return store


def _publish(store: Store, folder: str) -> None:
    """Give the folder to all ranks; return when they have it, as the store may end with this
    process."""
    store.set(FOLDER_KEY, folder)
    others = int(os.environ["WORLD_SIZE"]) - 1
    while store.add(f"{FOLDER_KEY}/received", 0) < others:
        time.sleep(0.05)


def _run_as_rank(folder: Path, store: Store, accept: Sequence[str]) -> None:
    """Run as a rank. The rank that failed first reports the failure; the others leave with exit
    code 1."""
    from pipeline.execution.worker import run_rank

    try:
        run_rank(folder, store, accept=accept)
    except Interrupted:
        if worker_rank() == 0:  # which records and reports it
            raise
        sys.exit(STOPPED)
    except (Exception, SystemExit):
        if failures.first_rank(folder) == worker_rank():
            error = failures.first(folder, [])
            with contextlib.suppress(OSError, JournalDamaged):
                if undo.did_nothing(folder):  # as rank 0 sees, too
                    undo.said(error, folder)
            raise error from None
        sys.exit(1)


def is_done(plan: Plan, folder: Path) -> bool:
    """Whether every stage has finished already; says so."""
    journal = Journal(folder / rundir.JOURNAL)
    if plan_resume(plan, journal, thorough=False).run or plan_resume(plan, journal).run:
        return False
    early = ends_early(plan)
    if early is None and not journal.ended_well():
        journal.write("run finished")
    say(f"nothing to do: {'every stage' if early is None else f'all up to {early}'} has finished")
    _show_results(plan, folder)
    return True


def _show_results(plan: Plan, folder: Path) -> None:
    """Say what came out of a run that has ended well, where it is, and what to do next."""
    measured: list[tuple[str, str]] = []
    with contextlib.suppress(OSError):
        measured += outcome(folder)
    trained = [step.slot for step in plan.steps if _trains(step)]
    names = {trained[0]: "checkpoint"} if len(trained) == 1 else {}
    places = [("run folder", folder), *results(plan, Journal(folder / rundir.JOURNAL))]
    found = [(names.get(name, name), shown_path(place)) for name, place in places]
    state: RunState = "finished" if ends_early(plan) is None else "stopped"
    for line in align([*measured, *found, *next_lines(folder, state)], left=2):
        say(f"  {line}")


def _continues(plan: Plan, folder: Path, journal: Journal) -> str:
    """Say from where a run goes on."""
    done = finished_in(plan, journal)
    left = [step for step in plan.steps if step.slot not in done]
    step = saved_step(folder / rundir.METRICS) if any(map(_trains, left)) else None
    where = "" if step is None else f" at step {step}"
    return f"continues{where} ({len(done)} of {len(plan.steps)} slots done)"


def _trains(step: PlannedSlot) -> bool:
    return step.gives is not None and issubclass(step.gives, TrainedRun)


@contextlib.contextmanager
def opened(plan: Plan, folder: Path) -> Iterator[None]:
    """Record the start and the end of a run in its folder, whose lock is held, and print a good
    end.

    A command that fails before it has done anything under other settings is undone.
    """
    journal = Journal(folder / rundir.JOURNAL)
    with system_errors_as(UsageError):
        before, recipe = undo.Before(folder), plan.recipe.dump()
        write_origins(folder, plan.recipe)
        replace_text(folder / rundir.RECIPE, recipe)
        here = rundir.environment()
        changes = rundir.write_environment(folder, here)
        if journal.events():
            say(_continues(plan, folder, journal))
        failures.clear(folder)
        activity_record.clear(folder)
        replaced = [str(note) for note in plan.recipe.replaced]
        journal.write(
            "run started", procs=plan.view.procs, device=plan.view.device, environment=here,
            **({} if before.recipe is None else {"changed": before.recipe != recipe}),
            **({"replaced": replaced} if replaced else {}),
            **({"hub": plan.hub} if plan.hub else {}),
        )  # fmt: skip
    for note in replaced:
        click.echo(f"warning: {note}", err=True)
    if changes:
        click.echo(
            f"other versions than when this run was last started: {', '.join(changes)}; results "
            "may differ in the last bits",
            err=True,
        )
    began = time.monotonic()
    try:
        yield
        rundir.require_kept(folder)
    except BaseException as error:
        rundir.require_kept(folder)
        stopped = isinstance(error, Interrupted)
        with LastWords(REPORT_SECONDS if stopped else None) as words:
            _journal_end(journal, folder, error, before)
            report(folder, words)
        if stopped:
            one_node = plan.view.procs == plan.per_node
            how = failures.continuation(folder) if one_node else failures.ON_EVERY_NODE
            raise RunStopped(f"stopped by {error}\n{how}") from None
        raise
    early = ends_early(plan)
    with LastWords(None) as words:
        if early is None:
            journal.write("run finished")
        else:
            journal.write("run stopped", problem=f"after slot `{early}`, as asked")
        report(folder, words)
    how = "finished" if early is None else f"stopped after {early}, as asked,"
    say(f"{how} in {duration(time.monotonic() - began)}")
    _show_results(plan, folder)


def report(folder: Path, words: LastWords) -> None:
    """Write the report of a run whose end is recorded; whatever goes wrong here changes nothing."""
    try:
        with words.unawaited():
            from pipeline.view.report.run_report import write_report

            write_report(folder, ended=True)
    except (Exception, Interrupted) as error:
        why = str(error) if isinstance(error, Interrupted) else in_words(error)
        how = f"pipe report {shlex.quote(str(folder))}"
        click.echo(f"{folder}/report.html could not be written: {why} (later: {how})", err=True)


def _journal_end(journal: Journal, folder: Path, error: BaseException, before: undo.Before) -> None:
    """Record how the run has ended, or that it is as it was `before`. A full disk may be what has
    ended it."""
    with contextlib.suppress(OSError):
        if not isinstance(error, PipeError) and failures.first_rank(folder) is not None:
            # torchrun stops rank 0 when another rank has failed, which has reported why
            error = failures.first(folder, [])
        if not isinstance(error, PipeError):
            journal.write("run stopped", problem=str(error) or type(error).__name__)
            return
        note: dict[str, bool] = {}
        with contextlib.suppress(OSError, JournalDamaged):
            if undo.did_nothing(folder):
                before.put_back()
                undo.said(error, folder)
                note = {"undone": True}
        journal.write("run failed", problem=shown(str(error)), **note)

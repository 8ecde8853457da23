"""A command's record in the run's folder: its start and its end, and the last lines about it."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import click

from pipeline.chain.plan import Plan, PlannedSlot
from pipeline.chain.trainings import training_of
from pipeline.contracts.training import TrainedRun
from pipeline.distributed.signals import Interrupted, LastWords
from pipeline.errors import (
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
from pipeline.execution.selection import ends_early
from pipeline.launch import undo
from pipeline.utils.files import replace_text
from pipeline.utils.terminal import shown
from pipeline.utils.text import align, duration, shown_path
from pipeline.view.ending import next_lines, outcome
from pipeline.view.history import RunState

REPORT_SECONDS = 5.0
"""Seconds that the report of a stopped run may take: who has stopped it waits for the exit code."""


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
    trains = next((one.slot for one in left if _trains(one)), None)
    training = trains and training_of(plan.view.wiring, trains)
    step = None if training is None else saved_step(folder / rundir.METRICS, training)
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
            **({} if before.recipe is None else {"changed": before.recipe != recipe.encode()}),
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

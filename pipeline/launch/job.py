"""A command that runs what is not done: its record in the run's folder, and its last lines.

A command that fails before it has done anything leaves the run as it was: its settings, and what
lists and reports say of it.
"""

from __future__ import annotations

import contextlib
import functools
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import click

from pipeline.chain.artifacts import training_of
from pipeline.chain.plan import Plan, resolved
from pipeline.contracts.metrics import is_record
from pipeline.contracts.stage import ENGINE_FILE, ENVIRONMENT_FILE, engine_file
from pipeline.distributed.settings import ProcessCounts
from pipeline.distributed.signals import Interrupted, StopRequest
from pipeline.errors import (
    JournalDamaged,
    PipeError,
    RunStopped,
    UsageError,
    in_words,
    system_errors_as,
)
from pipeline.execution import failures, rundir
from pipeline.execution.journal import Journal, command_begins
from pipeline.execution.rank_logging import ACTIVITY_FILE, say
from pipeline.execution.resume import (
    ResumePlan,
    Selection,
    ends_early,
    finished_in,
    plan_resume,
    results,
)
from pipeline.execution.rundir import saved_step
from pipeline.utils.files import private_folder, replace_bytes, replace_text
from pipeline.utils.foreign import read_tail, read_whole
from pipeline.utils.terminal import shown, typed
from pipeline.utils.text import align, duration, shown_path
from pipeline.view.ending import next_lines, outcome
from pipeline.view.screen import Display, Screen

Meanwhile = Callable[[Plan, Path], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to start, or to continue, as a command asks for it."""

    plan: Callable[[ProcessCounts], Plan]
    """Makes the plan for what a launcher has started."""
    folder: Callable[[Plan], Path]
    """Makes or finds the run's folder; called once in the whole run."""
    display: Display
    accept: tuple[str, ...] = ()
    """Changes that are intended."""
    selection: Selection = field(default_factory=Selection)
    meanwhile: Meanwhile = lambda plan, folder: nullcontext()
    """Surrounds the run with what else this machine does for it meanwhile."""
    earlier_folder: Path | None = None
    """The run's folder, if it may hold a run already, whose commits are kept."""

    @contextlib.contextmanager
    def locked_folder(self, given: ProcessCounts) -> Iterator[tuple[Plan, Path]]:
        """Hold the lock of the run's folder; yields what is left to do there, and the folder.

        Names of the hub have the commits that they had when the run began, or have now. Raises
        RecipeError, RunLocked, UsageError, and what `plan` raises."""
        plan = self.plan(given)
        was = self.earlier_folder
        plan = resolved(plan, Journal(was / rundir.JOURNAL).state().commits if was else {})
        folder = self.folder(plan)
        with rundir.locked(folder):
            typed(str(folder))
            self.selection.set_aside(plan, Journal(folder / rundir.JOURNAL))
            yield self.selection.cut(plan), folder

    @contextlib.contextmanager
    def running(self, plan: Plan, folder: Path) -> Iterator[Screen]:
        """Run the body as the run: recorded, shown on the screen that it yields, and surrounded by
        what this machine does for it meanwhile."""
        with (
            self.display.to_the_end(),
            recorded_start_and_end(plan, folder),
            self.meanwhile(plan, folder),
            self.display.shown(plan, folder) as screen,
        ):
            yield screen


@contextlib.contextmanager
def recorded_start_and_end(plan: Plan, folder: Path) -> Iterator[None]:
    """Record the start and the end of a run in its folder, whose lock this process has, and print a
    good end.

    A command that fails before it has done anything under other settings is undone.
    """
    journal = Journal(folder / rundir.JOURNAL)
    with system_errors_as(UsageError):
        before, recipe = settings_in(folder), plan.recipe.dump()
        rundir.write_origins(folder, plan.recipe)
        replace_text(folder / rundir.RECIPE, recipe)
        here = rundir.machine_facts()
        changes = rundir.write_environment(folder, here)
        if journal.events():
            say(_continues(plan, folder, journal))
        failures.clear(folder)
        (folder / ACTIVITY_FILE).unlink(missing_ok=True)
        replaced = [str(note) for note in plan.recipe.replaced]
        known = before[rundir.RECIPE]
        journal.write(
            "run started", procs=plan.view.procs, device=plan.view.device, environment=here,
            **({"changed": known != recipe.encode()} if known is not None else {}),
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
        signalled = record_end(functools.partial(_journal_end, journal, folder, error, before))
        if isinstance(error, Interrupted):  # who has stopped it waits for the exit code
            one_node = plan.view.procs == plan.per_node
            how = failures.continuation(folder) if one_node else failures.ON_EVERY_NODE
            raise RunStopped(f"stopped by {error}\n{how}") from None
        report(folder, signalled)
        raise
    early = ends_early(plan)
    event = "run finished" if early is None else "run stopped"
    problem = {} if early is None else {"problem": f"after slot `{early}`, as asked"}
    report(folder, record_end(lambda: journal.write(event, **problem)))
    how = "finished" if early is None else f"stopped after {early}, as asked,"
    say(f"{how} in {duration(time.monotonic() - began)}")
    _show_results(plan, folder)


def left_to_run(plan: Plan, folder: Path) -> ResumePlan | None:
    """The slots that are left to run; None, and a line on the screen, if all have finished."""
    journal = Journal(folder / rundir.JOURNAL)
    found = plan_resume(plan, journal)
    if found.run:
        return found
    early = ends_early(plan)
    if early is None and not journal.state().ended_well:
        journal.write("run finished")
    say(f"nothing to do: {'every stage' if early is None else f'all up to {early}'} has finished")
    _show_results(plan, folder)
    return None


def _show_results(plan: Plan, folder: Path) -> None:
    """Say what came out of a run that has ended well, where it is, and what to do next."""
    measured: list[tuple[str, str]] = []
    with contextlib.suppress(OSError, PipeError):
        measured += outcome(folder)
    trained = [planned.slot for planned in plan.trainings]
    names = {trained[0]: "checkpoint"} if len(trained) == 1 else {}
    places = [("run folder", folder), *results(plan, Journal(folder / rundir.JOURNAL))]
    found = [(names.get(name, name), shown_path(place)) for name, place in places]
    state = "finished" if ends_early(plan) is None else "stopped"
    for line in align([*measured, *found, *next_lines(folder, state)], left=2):
        say(f"  {line}")


def _continues(plan: Plan, folder: Path, journal: Journal) -> str:
    """Say from where a run continues."""
    done = finished_in(plan, journal)
    trains = [planned.slot for planned in plan.trainings if planned.slot not in done]
    training = training_of(plan.view.wiring, trains[0]) if trains else None
    step = None if training is None else saved_step(folder / rundir.METRICS, training)
    where = "" if step is None else f" at step {step}"
    return f"continues{where} ({len(done)} of {len(plan.slots)} slots done)"


def record_end(record: Callable[[], object]) -> Interrupted | None:
    """Record an end that no signal prevents any more. Returns the signal that came meanwhile; a
    second Ctrl-C ends the process at once."""
    try:
        with StopRequest().deferred():
            record()
    except Interrupted as interrupted:
        return interrupted
    return None


def report(folder: Path, interrupted: Interrupted | None) -> None:
    """Write the report of a run whose end is recorded, unless the process is asked to end; whatever
    goes wrong here changes nothing."""
    try:
        if interrupted is not None:
            raise interrupted
        from pipeline.view.run_report import write_report

        write_report(folder, ended=True)
    except (Exception, Interrupted) as error:
        why = str(error) if isinstance(error, Interrupted) else in_words(error)
        how = f"pipe report {shlex.quote(str(folder))}"
        click.echo(f"{folder}/report.html could not be written: {why} (later: {how})", err=True)


def _journal_end(journal: Journal, folder: Path, error: BaseException, before: Settings) -> None:
    """Record how the run has ended, or that it is as it was `before`, if the disk takes it."""
    with contextlib.suppress(OSError):
        if not isinstance(error, PipeError) and failures.first_rank(folder) is not None:
            # torchrun stops rank 0 when another rank has failed, which has reported why
            error = failures.first(folder, [])
        if not isinstance(error, PipeError):
            journal.write("run stopped", problem=str(error) or type(error).__name__)
            return
        note: dict[str, bool] = {}
        with contextlib.suppress(OSError, JournalDamaged):
            if is_to_be_undone(folder):
                put_back(folder, before)
                say_undone(error, folder)
                note = {"undone": True}
        journal.write("run failed", problem=shown(str(error)), **note)


SETTINGS = (rundir.RECIPE, rundir.ORIGINS, ENVIRONMENT_FILE, ENGINE_FILE, rundir.PLAN)
"""Files that each command writes again."""
KEYS_OF_WORK = ("loss", "checkpoint_stall_seconds")
"""Keys of records of what is not undone: a step, a checkpoint."""
UNDONE_LINE = "  the run is as it was before this command, its recipe too"
Settings = Mapping[str, bytes | None]


def settings_in(folder: Path) -> Settings:
    """The settings of a run before a command, None for a file that is not there. Raises OSError."""
    names = [*SETTINGS, *(file.name for file in folder.glob(engine_file("*")))]
    return {
        name: read_whole(folder / name, within=folder) if (folder / name).exists() else None
        for name in names
    }


def put_back(folder: Path, before: Settings) -> None:
    """Write the settings again, and have no one count the failure. Raises OSError."""
    for name, content in before.items():
        if content is None:
            (folder / name).unlink(missing_ok=True)
        else:
            replace_bytes(folder / name, content)
    (private_folder(folder / failures.FOLDER) / failures.UNDONE).touch()


def is_to_be_undone(folder: Path) -> bool:
    """Whether the newest command, which has failed, is undone: it changed the settings of a run
    that was there, or the training refused to continue under them, and it led to neither a step nor
    a checkpoint nor a durable result. Raises OSError, JournalDamaged."""
    events = Journal(folder / rundir.JOURNAL).events()
    command = events[command_begins(events) :]
    starts = [event for event in command if event["event"] == "run started"]
    changed = starts[0].get("changed") if starts else None
    if changed is None or not (changed or any(one.refused for one in failures.reports(folder))):
        return False
    results = [event for event in command if event["event"] == "slot finished" and event["record"]]
    newest = filter(is_record, read_tail(folder / rundir.METRICS))
    since = starts[0]["time"]
    steps = [one for one in newest if any(key in one for key in KEYS_OF_WORK)]
    return not results and all((one.get("time") or 0.0) < since for one in steps)


def say_undone(error: PipeError, folder: Path) -> None:
    """Have the error say that the run is as it was."""
    error.args = (f"{failures.without_continuation(str(error), folder)}\n{UNDONE_LINE}",)

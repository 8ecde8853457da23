"""`pipe ls`, `status`, `logs`, `clean`, `report`, `compare` and `track`: look at runs."""

from __future__ import annotations

import codecs
import itertools
import json
import os
import shlex
import sys
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from pipeline.commands import options
from pipeline.commands.options import PATH, Count, flag, option
from pipeline.errors import (
    JournalDamaged,
    PipeError,
    RunLocked,
    UsageError,
    in_words,
    system_errors_as,
)
from pipeline.utils.files import replace_text
from pipeline.utils.foreign import lines_of, open_regular
from pipeline.utils.terminal import bare, hide_environment, shown
from pipeline.utils.text import align, did_you_mean, human, plural

if TYPE_CHECKING:
    from pipeline.view.run import Run


DEFAULT = "runs"


@click.command("ls")
@click.argument("runs", type=PATH, default=DEFAULT)
@options.as_json
def ls(runs: Path, as_json: bool) -> None:
    """List the runs in the folder RUNS, by default ./runs; the newest is last."""
    from pipeline.execution import rundir

    if (runs / rundir.RECIPE).is_file() and (runs / rundir.JOURNAL).exists():
        raise UsageError(f"{runs} is a run", hint=f"pipe status {shlex.quote(str(runs))}")
    if not runs.is_dir() and runs != Path(DEFAULT):
        raise UsageError(f"{runs}: no such folder")
    described = list[dict[str, Any] | None]()  # None for a folder that others have not opened
    for folder in sorted(runs.iterdir()) if runs.is_dir() else ():
        try:
            if (folder / rundir.RECIPE).is_file():
                described.append(_described(folder))
        except PermissionError:
            described.append(None)
        except Exception as error:  # one that cannot be read is no reason to list no other
            nothing = dict.fromkeys(("slot", "training", "step", "loss", "best", "ended_early"))
            state = {"state": "damaged", "damage": in_words(error)}
            started = folder.stat().st_mtime
            described.append({"folder": str(folder), **state, "started": started, **nothing})
    found = sorted(filter(None, described), key=lambda run: run["started"])
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    for run in found:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run["started"]))
        loss = "" if run["loss"] is None else f"loss {run['loss']:.4f}"
        slot = "" if run["slot"] is None or run["state"] == "finished" else f"in {run['slot']}"
        of = f"{run['training']} " if run["training"] else ""
        step = "" if run["step"] is None else f"{of}step {run['step']}"
        best = run["best"]
        best = best and f"held out {best['eval_loss']:.4f} at step {best['step']} (best)"
        early = run["ended_early"] and f"ended early: {run['ended_early']}"
        fields = (when, f"{run['state']:<9}", run["folder"], step, loss, best, slot, early)
        click.echo("  ".join(field for field in fields if field))
        if run["damage"]:
            click.echo(f"  {run['damage']}", err=True)
    if None in described:
        closed = plural(described.count(None), "folder")
        click.echo(f"{closed} of others cannot be read", err=True)
    elif not found:
        click.echo(f"no runs in {runs}", err=True)


def _described(folder: Path) -> dict[str, Any]:
    from pipeline.contracts.metrics import is_record
    from pipeline.execution import rundir
    from pipeline.execution.journal import Journal
    from pipeline.execution.run_state import RunState, Training
    from pipeline.utils.foreign import read_tail
    from pipeline.view.run import ended

    state, damage = RunState(), None
    try:
        state = Journal(folder / rundir.JOURNAL).state()
    except JournalDamaged as error:
        damage = str(error)
    newest = RunState.of(one for one in read_tail(folder / rundir.METRICS) if is_record(one))
    training = next(reversed(newest.trainings.values()), Training())
    now = "running" if rundir.is_locked(folder) else ended(folder, state)
    slots = [event["slot"] for event in state.events if event["event"] == "slot started"]
    return {
        "folder": str(folder),
        "state": "damaged" if damage else now,
        "damage": damage,
        "started": state.events[0]["time"] if state.events else folder.stat().st_mtime,
        "slot": slots[-1] if slots else None,
        "step": training.step.get("step"),
        "loss": training.step.get("loss"),
        "training": training.slot or None,
        "best": training.best,
        "ended_early": shown(training.ended_early) or None,
    }


@click.command("status")
@options.run()
@flag("-f", "--follow", "Keep the display up to date until RUN ends.")
@options.as_json
def status(run: Path, follow: bool, as_json: bool) -> None:
    """Show the progress of RUN, by default the newest run in ./runs.

    Works from any terminal that sees the run's folder, and does not slow training down.
    """
    from pipeline.view.run import Run, recipe_in

    if follow and as_json:
        raise click.UsageError("--follow excludes --json")
    found = Run(run, recipe_in(run).uses)
    found.look()
    if not as_json:
        _draw(found, follow=follow)
        return
    training = found.training
    running = (slot for slot, one in found.slots.items() if one.state == "running")
    facts = {
        "schema_version": 1,
        "folder": str(found.folder),
        "state": found.state,
        "slot": next(running, None),
        "activity": found.activity() or None,
        "training": training.slot or None,
        "step": training.step or None,
        "evaluation": training.newest.get("evaluation"),
        "checkpoint": training.newest.get("checkpoint"),
        "measurements": {
            name: {"step": values[-1][0], "value": values[-1][1]}
            for name, values in training.measured.items()
        },
        "mean_tokens_per_second": training.speed.mean("tokens_per_second"),
        "seconds_left": found.seconds_left,
        "ended_early": training.ended_early or None,
    }
    click.echo(json.dumps(facts, indent=1, allow_nan=False))


def _draw(run: Run, *, follow: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    from pipeline.view.ending import next_lines
    from pipeline.view.live import ASCII, LABEL_WIDTH, UNICODE, drawing
    from pipeline.view.run import LOOK_SECONDS

    console = Console(file=bare(sys.stdout), highlight=False)
    marks = ASCII if console.options.ascii_only else UNICODE

    def picture() -> Any:
        name, width = run.folder.resolve().name, console.width
        return drawing(run, [], name=name, where=run.state, width=width, marks=marks)

    if not follow or not console.is_terminal:
        console.print(picture())
    else:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                run.look()
                live.update(picture(), refresh=True)
                if run.state != "running":
                    break
                time.sleep(LOOK_SECONDS)
    lines = next_lines(run.folder, run.state)
    width = max([LABEL_WIDTH, *(len(label) for label, _ in lines)])
    for label, text in lines:
        click.echo(shown(f"{label:<{width}}  {text}"))  # whole, so that it can be copied


LONGEST = 1 << 20
"""Most bytes of a line of a log that is printed."""


@click.command("logs")
@options.run()
@option("--rank", "Rank to print.", type=Count(min=0), default=0)
@flag("-f", "--follow", "Print new lines until RUN ends.")
@option("-n", "--lines", "Print the last N lines only.", type=Count(min=0))
def logs(run: Path, rank: int, follow: bool, lines: int | None) -> None:
    """Print the log of one rank of RUN, by default the newest run in ./runs."""
    from pipeline.execution import rundir

    folder = rundir.existing(run)
    file = folder / "logs" / f"rank-{rank:05d}.log"
    if not file.is_file():
        ranks = sorted(str(int(one.stem[5:])) for one in (folder / "logs").glob("rank-*.log"))
        raise UsageError(f"{folder} has no log of rank {rank}", hint=did_you_mean("", ranks))
    with system_errors_as(UsageError):
        log = open_regular(file, within=folder)
    with log:
        if lines is not None:
            ends = deque((log.tell() for _ in lines_of(log, LONGEST)), maxlen=lines + 1)
            log.seek(0 if len(ends) <= lines else ends[0])
        _print(log)
        while follow and rundir.is_locked(folder):
            _print(log)
            time.sleep(0.2)
        _print(log)


def _print(log: BinaryIO) -> None:
    """Print a log from its position to its end, without lines that are too long, which it names."""
    decode, place = codecs.getincrementaldecoder("utf-8")("replace").decode, log.tell()
    for line in itertools.chain(lines_of(log, LONGEST), [b""]):
        left_out = log.tell() - len(line) - place
        if left_out:
            click.echo(f"warning: a line of {human(left_out)} is left out", err=True)
        click.echo(decode(line), nl=False)
        place = log.tell()


@click.command("clean")
@click.argument(
    "runs", metavar="[RUN]...", nargs=-1, type=PATH, shell_complete=options.complete_runs
)
@flag("--yes", "Remove what is listed.")
@flag("--all-checkpoints", "Remove every checkpoint of runs whose model is exported.")
def clean(runs: tuple[Path, ...], yes: bool, all_checkpoints: bool) -> None:
    """List files of each RUN that are no longer needed; remove them with --yes.

    Without RUN, looks at all runs in ./runs. Removes files of dead processes, and checkpoints of
    finished runs except the newest, the exported one, and what keep_every and keep_best keep. Keeps
    exports, reports, logs and measurements, and everything of a run in progress. Exit code 1 if
    something could not be read or removed.
    """
    from pipeline.execution import clean as cleaning
    from pipeline.execution import rundir

    folders = [rundir.existing(run) for run in runs] or sorted(
        file.parent for file in Path("runs").glob(f"*/{rundir.RECIPE}")
    )
    if not folders:
        raise UsageError("there is no run in runs", hint="name the folder of a run")
    sizes, failures = list[int](), 0
    for folder in {folder.resolve(): folder for folder in folders}.values():
        try:
            if yes:
                found = cleaning.clean(folder, all_checkpoints=all_checkpoints)
            elif rundir.is_locked(folder):
                found = cleaning.CleanResult(notes=("is under way: all of it stays",))
            else:
                found = cleaning.find(folder, all_checkpoints=all_checkpoints)
        except RunLocked as error:
            found = cleaning.CleanResult(notes=(in_words(error),))
        except (PipeError, OSError) as error:
            found = cleaning.CleanResult(failures=(in_words(error),))
        notes = (*found.notes, *found.failures)
        if found.waste or notes:
            click.echo(f"{folder}:")
        rows = [
            (f"  {human(one.size)}", str(one.path.relative_to(folder)), one.why)
            for one in found.waste
        ]
        for line in (*align(rows, left=3), *(f"  {note}" for note in notes)):
            click.echo(line)
        sizes += [one.size for one in found.waste]
        failures += len(found.failures)
    ending = "" if yes or not sizes else "; --yes removes them"
    total = f"{plural(len(sizes), 'item')}, {human(sum(sizes))}"
    click.echo(f"{'removed ' if yes else ''}{total}{ending}")
    if failures:
        raise PipeError(f"{plural(failures, 'failure')}: see above")


@click.command("report")
@options.run(metavar="RUN|FOLDER")
@options.out("HTML file to write.", default="report.html in RUN or FOLDER")
@flag("--open", "opens", "Open the page in the browser.")
def report(run: Path, out: Path | None, opens: bool) -> None:
    """Write the report of RUN, by default the newest run in ./runs: one HTML file.

    The report shows curves, time by stage, memory, events, generated samples, the recipe with the
    origin of every value, and the environment. Each run also writes it when it ends. The report of
    a FOLDER with runs is a table of all runs, with their curves and links to their reports.
    """
    from pipeline.view.compare import holds_runs, write_folder_report
    from pipeline.view.run_report import write_report

    hide_environment()
    with system_errors_as(UsageError):
        page = (write_folder_report if holds_runs(run) else write_report)(run, out)
    click.echo(page)
    if opens:
        import webbrowser

        address = page.resolve().as_uri()
        displays = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
        if not any(map(os.environ.get, displays)) or not webbrowser.open(address):
            click.echo(f"no browser can be opened from here: open {address}", err=True)


@click.command("compare")
@click.argument(
    "runs", metavar="RUN RUN...", nargs=-1, type=PATH, shell_complete=options.complete_runs
)
@options.out("HTML page to write, with the curves of the runs.")
@options.as_json
def compare(runs: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Compare the results, recipes and environments of runs.

    A * marks the best value of a row. Lower is better for losses and memory, higher for speeds.
    """
    from pipeline.view import compare as comparison
    from pipeline.view.run import History

    if len(runs) < 2:
        raise click.UsageError("name two runs or more: pipe compare RUN RUN (pipe ls lists them)")
    hide_environment()
    histories = [History(run) for run in runs]
    tables = {**comparison.differences(histories), "results": comparison.results(histories)}
    names = [history.name for history in histories]
    if as_json:
        rows = {title: [asdict(row) for row in found] for title, found in tables.items()}
        click.echo(json.dumps({"schema_version": 1, "runs": names, **rows}, indent=1))
    else:
        click.echo("\n".join(comparison.lines(names, **tables)))
    if out is not None:
        with system_errors_as(UsageError):
            replace_text(out, comparison.comparison_page(histories))
        click.echo(f"wrote {out}", err=as_json)


@click.command("track")
@options.run()
@options.overrides
def track(run: Path, overrides: tuple[str, ...]) -> None:
    """Send the remaining measurements of RUN, by default the newest run in ./runs, to its trackers.

    Use it after runs on machines without a network, or after a run that ended before everything
    was sent. OVERRIDES change the run's recipe for this command, such as track.mode=online.
    """
    from pipeline.chain.plan import plan_file, require_sound
    from pipeline.execution import rundir
    from pipeline.track.feeder import facts_of, failure, feeders
    from pipeline.track.stage import TrackerStage
    from pipeline.view.run import History

    folder = rundir.existing(run)
    state = History(folder).state
    if state == "running":
        raise UsageError(f"{folder} is under way, and is sent while it runs")
    plan = plan_file(folder / rundir.RECIPE, overrides, skip_checks=True)
    require_sound(plan, TrackerStage)
    found = feeders(folder, plan.slots)
    if not found:
        hint = "name one in the recipe, as in `track: {use: track.sqlite, file: runs.sqlite}`"
        raise UsageError(f"the recipe of {folder} has no tracker", hint=hint)
    failures = []
    for slot, feeder in found.items():
        try:
            with feeder.alone():  # the run's own may still be at work
                feeder.open(facts_of(folder, plan.recipe.public()))
                feeder.close(state)
        except Exception as error:
            failures.append(f"{slot}: {failure(folder, slot, error)}")
        else:
            click.echo(f"{slot}: {plural(feeder.steps, 'step')} sent")
    if failures:
        raise PipeError("\n".join(failures))

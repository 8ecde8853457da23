"""`pipe report`, `pipe compare` and `pipe track`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import click

from pipeline.commands import completion, options
from pipeline.commands.options import PATH, flag
from pipeline.errors import PipeError, UsageError, system_errors_as
from pipeline.utils.files import replace_text
from pipeline.utils.terminal import hide_environment
from pipeline.utils.text import plural


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
    from pipeline.view.report.compare import holds_runs, write_folder_report
    from pipeline.view.report.run_report import write_report

    hide_environment()
    with system_errors_as(UsageError):
        page = (write_folder_report if holds_runs(run) else write_report)(run, out)
    click.echo(page)
    if opens:
        import webbrowser

        address = page.resolve().as_uri()
        displays = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
        graphical = sys.platform != "linux" or any(os.environ.get(name) for name in displays)
        if not graphical or not webbrowser.open(address):
            click.echo(f"no browser can be opened from here: open {address}", err=True)


@click.command("compare")
@click.argument("runs", metavar="RUN RUN...", nargs=-1, type=PATH, shell_complete=completion.runs)
@options.out("HTML page to write, with the curves of the runs.")
@options.as_json
def compare(runs: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Compare the results, recipes and environments of runs.

    A * marks the best value of a row. Lower is better for losses and memory, higher for speeds.
    """
    from pipeline.view.report import compare as comparison
    from pipeline.view.run import History

    if len(runs) < 2:
        raise click.UsageError("name two runs or more: pipe compare RUN RUN (pipe ls lists them)")
    hide_environment()
    histories = [History(run) for run in runs]
    tables = {
        "recipes": comparison.recipe_differences(histories),
        "environments": comparison.environment_differences(histories),
        "results": comparison.results(histories),
    }
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
    found = feeders(folder, plan)
    if not found:
        hint = "name one in the recipe, as in `track: {use: track.sqlite, file: runs.sqlite}`"
        raise UsageError(f"the recipe of {folder} has no tracker", hint=hint)
    failures = []
    for slot, feeder in found.items():
        try:
            with feeder.alone():  # the run's own may still be at work
                feeder.open(facts_of(folder, plan.recipe))
                feeder.close(state)
        except Exception as error:
            failures.append(f"{slot}: {failure(folder, slot, error)}")
        else:
            click.echo(f"{slot}: {plural(feeder.steps, 'step')} sent")
    if failures:
        raise PipeError("\n".join(failures))

"""`pipe report` and `pipe compare`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from pipeline.commands.completion import RUN
from pipeline.commands.options import json_option, out_option, run_argument
from pipeline.errors import UsageError, system_errors_as
from pipeline.utils.files import replace_text
from pipeline.utils.terminal import hide_environment


@click.command("report")
@run_argument(metavar="RUN|FOLDER")
@out_option("HTML file to write.", default="report.html in RUN or FOLDER")
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser.")
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
        if holds_runs(run):
            page = write_folder_report(run, out)
        else:
            page = write_report(run, out)
    click.echo(page)
    if opens:
        import webbrowser

        address = page.resolve().as_uri()
        displays = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
        graphical = sys.platform != "linux" or any(os.environ.get(name) for name in displays)
        if not graphical or not webbrowser.open(address):
            click.echo(f"no browser can be opened from here: open {address}", err=True)


@click.command("compare")
@click.argument(
    "runs", metavar="RUN RUN...", nargs=-1, type=click.Path(path_type=Path), shell_complete=RUN
)
@out_option("HTML page to write, with the curves of the runs.")
@json_option
def compare(runs: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Compare the results, recipes and environments of runs.

    A * marks the best value of a row. Lower is better for losses and memory, higher for speeds.
    """
    import json
    from dataclasses import asdict

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

"""`pipe report` and `pipe compare`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from pipeline.commands.completion import RUN

HTML = click.Path(path_type=Path, dir_okay=False)


@click.command("report")
@click.argument(
    "run",
    metavar="[RUN|FOLDER]",
    type=click.Path(path_type=Path),
    required=False,
    shell_complete=RUN,
)
@click.option(
    "-o", "--out", type=HTML, help="The file to write, instead of report.html in RUN or FOLDER."
)
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser.")
def report(run: Path | None, out: Path | None, opens: bool) -> None:
    """Write the report of RUN (by default the newest in ./runs): one HTML file that needs no
    network.

    It has the curves, time by stage, memory, events, generated samples, the recipe with the origin
    of every value, and the environment. A run writes it at its end; this works at any time. Of a
    FOLDER with runs, it is a table of all runs, their curves, and links to their reports.
    """
    from pipeline.errors import UsageError, system_errors_as
    from pipeline.execution import rundir
    from pipeline.utils.terminal import hide_environment
    from pipeline.view.report.folder_report import holds_runs, write_folder_report
    from pipeline.view.report.run_report import write_report

    hide_environment()
    with system_errors_as(UsageError):
        if run is not None and holds_runs(run):
            page = write_folder_report(run, out)
        else:
            page = write_report(run or rundir.newest(Path("runs")), out)
    click.echo(page)
    if opens:
        _open(page.resolve().as_uri())


def _open(address: str) -> None:
    """Open a page in the browser of this session; say where it is if there is none."""
    import webbrowser

    displays = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    graphical = sys.platform != "linux" or any(os.environ.get(name) for name in displays)
    if not graphical or not webbrowser.open(address):
        click.echo(f"no browser can be opened from here: open {address}", err=True)


@click.command("compare")
@click.argument(
    "runs", metavar="RUN RUN...", nargs=-1, type=click.Path(path_type=Path), shell_complete=RUN
)
@click.option("-o", "--out", type=HTML, help="Write an HTML page with the runs' curves too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def compare(runs: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Compare runs: where their recipes and environments differ, and their results.

    A * marks the best value of a row. Lower is better for losses and memory, higher for speeds.
    """
    import json
    from dataclasses import asdict

    from pipeline.errors import UsageError, system_errors_as
    from pipeline.utils.files import replace_text
    from pipeline.utils.terminal import hide_environment
    from pipeline.view.history import read_history
    from pipeline.view.report import compare as comparison

    if len(runs) < 2:
        raise click.UsageError("name two runs or more")
    hide_environment()
    histories = [read_history(run) for run in runs]
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

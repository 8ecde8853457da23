"""`pipe report` and `pipe compare`."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.commands.completion import RUN

HTML = click.Path(path_type=Path, dir_okay=False)


@click.command("report")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path), shell_complete=RUN)
@click.option("--out", type=HTML, help="The file to write, instead of RUN/report.html.")
def report(run: Path, out: Path | None) -> None:
    """Write the report of RUN: one HTML file that needs no network.

    It has the curves, time by stage, memory, events, generated samples, the recipe with the origin
    of every value, and the environment. A run writes it at its end; this works at any time.
    """
    from pipeline.errors import UsageError, system_errors_as
    from pipeline.utils.terminal import hide_environment
    from pipeline.view.report.run_report import write_report

    hide_environment()
    with system_errors_as(UsageError):
        click.echo(write_report(run, out))


@click.command("compare")
@click.argument(
    "runs", metavar="RUN RUN...", nargs=-1, type=click.Path(path_type=Path), shell_complete=RUN
)
@click.option("--out", type=HTML, help="Write an HTML page with the runs' curves too.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def compare(runs: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Compare runs: what came out, and where their recipes and environments differ."""
    import json
    from dataclasses import asdict

    from pipeline.errors import UsageError, system_errors_as
    from pipeline.utils.files import replace_text
    from pipeline.utils.terminal import hide_environment
    from pipeline.utils.text import align
    from pipeline.view.history import read_history
    from pipeline.view.report import compare as comparison

    if len(runs) < 2:
        raise click.UsageError("name two runs or more")
    hide_environment()
    histories = [read_history(run) for run in runs]
    tables = {
        "results": comparison.results(histories),
        "recipes": comparison.recipe_differences(histories),
        "environments": comparison.environment_differences(histories),
    }
    names = [history.name for history in histories]
    if as_json:
        rows = {title: [asdict(row) for row in found] for title, found in tables.items()}
        click.echo(json.dumps({"schema_version": 1, "runs": names, **rows}, indent=1))
    else:
        for title, found in tables.items():
            head = [title if title == "results" else f"{title} differ in", *names]
            table = align([head, *([row.name, *row.values] for row in found)], left=len(head))
            click.echo("\n".join(table) if found else f"{head[0]} nothing")
            click.echo()
    if out is not None:
        with system_errors_as(UsageError):
            replace_text(out, comparison.comparison_page(histories))
        click.echo(f"wrote {out}", err=as_json)

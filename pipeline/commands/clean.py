"""`pipe clean`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.commands.completion import RUN
from pipeline.errors import PipeError, RunLocked, UsageError, in_words
from pipeline.utils.text import align, human, plural

if TYPE_CHECKING:
    from pipeline.execution.clean import CleanResult


@click.command("clean")
@click.argument(
    "runs", metavar="[RUN]...", nargs=-1, type=click.Path(path_type=Path), shell_complete=RUN
)
@click.option("--yes", is_flag=True, help="Remove what is listed.")
@click.option(
    "--all-checkpoints",
    is_flag=True,
    help="Remove every checkpoint of runs whose model is exported.",
)
def clean(runs: tuple[Path, ...], yes: bool, all_checkpoints: bool) -> None:
    """List files of each RUN that are no longer needed; remove them with --yes.

    Without RUN, looks at all runs in ./runs. Removes files of dead processes, and checkpoints of
    finished runs except the newest, the exported one, and what keep_every and keep_best keep. Keeps
    exports, reports, logs and measurements, and everything of a run in progress. Exit code 1 if
    something could not be read or removed.
    """
    from pipeline.execution import rundir

    folders = [rundir.existing(run) for run in runs] or sorted(
        file.parent for file in Path("runs").glob(f"*/{rundir.RECIPE}")
    )
    if not folders:
        raise UsageError("there is no run in runs", hint="name the folder of a run")
    folders = [*{folder.resolve(): folder for folder in folders}.values()]
    found = [_show(folder, _look(folder, yes, all_checkpoints)) for folder in folders]
    waste = [one for finding in found for one in finding.waste]
    total = f"{plural(len(waste), 'item')}, {human(sum(one.size for one in waste))}"
    ending = "" if yes or not waste else "; --yes removes them"
    click.echo(f"{'removed ' if yes else ''}{total}{ending}")
    failures = sum(len(finding.failures) for finding in found)
    if failures:
        raise PipeError(f"{plural(failures, 'failure')}: see above")


def _look(folder: Path, yes: bool, all_checkpoints: bool) -> CleanResult:
    """Return what was found, or removed. A run that is in use is noted, any other
    error is a failure."""
    from pipeline.execution import clean, rundir

    try:
        if yes:
            return clean.clean(folder, all_checkpoints=all_checkpoints)
        if rundir.is_locked(folder):
            return clean.CleanResult(notes=("is under way: all of it stays",))
        return clean.find(folder, all_checkpoints=all_checkpoints)
    except RunLocked as error:
        return clean.CleanResult(notes=(in_words(error),))
    except (PipeError, OSError) as error:
        return clean.CleanResult(failures=(in_words(error),))


def _show(folder: Path, finding: CleanResult) -> CleanResult:
    notes = (*finding.notes, *finding.failures)
    if finding.waste or notes:
        click.echo(f"{folder}:")
    rows = [
        (f"  {human(one.size)}", str(one.path.relative_to(folder)), one.why)
        for one in finding.waste
    ]
    for line in align(rows, left=3):
        click.echo(line)
    for note in notes:
        click.echo(f"  {note}")
    return finding

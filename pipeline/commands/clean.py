"""`pipe clean`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.commands import completion
from pipeline.commands.options import PATH, flag
from pipeline.errors import PipeError, RunLocked, UsageError, in_words
from pipeline.utils.text import align, human, plural

if TYPE_CHECKING:
    from pipeline.execution.clean import CleanResult


@click.command("clean")
@click.argument("runs", metavar="[RUN]...", nargs=-1, type=PATH, shell_complete=completion.runs)
@flag("--yes", "Remove what is listed.")
@flag("--all-checkpoints", "Remove every checkpoint of runs whose model is exported.")
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
    sizes, failures = list[int](), 0
    for folder in {folder.resolve(): folder for folder in folders}.values():
        found = _look(folder, yes, all_checkpoints)
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

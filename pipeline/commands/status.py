"""`pipe status` and `pipe logs`."""

from __future__ import annotations

import codecs
import itertools
import json
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from pipeline.commands.options import Count, json_option, run_argument
from pipeline.errors import RecipeError, UsageError, system_errors_as
from pipeline.utils.foreign import lines_of, open_regular
from pipeline.utils.terminal import bare, shown
from pipeline.utils.text import did_you_mean, human

if TYPE_CHECKING:
    from pipeline.view.run import Run

LONGEST = 1 << 20
"""Most bytes of a line of a log that is printed."""


@click.command("status")
@run_argument()
@click.option("-f", "--follow", is_flag=True, help="Keep the display up to date until RUN ends.")
@json_option
def status(run: Path, follow: bool, as_json: bool) -> None:
    """Show the progress of RUN, by default the newest run in ./runs.

    Works from any terminal that sees the run's folder, and does not slow training down.
    """
    from pipeline.execution import rundir
    from pipeline.recipe import read_recipe
    from pipeline.view.run import Run

    if follow and as_json:
        raise click.UsageError("--follow excludes --json")
    folder = rundir.existing(run)
    recipe, problems = read_recipe(folder / rundir.RECIPE)  # its variables may not be set here
    if recipe is None:
        raise RecipeError(problems)
    found = Run(folder, {slot: spec.use for slot, spec in recipe.stages.items()})
    found.look()
    if as_json:
        click.echo(json.dumps(_facts(found), indent=1, allow_nan=False))
        return
    _draw(found, follow=follow)


def _facts(run: Run) -> dict[str, object]:
    training = run.training
    return {
        "schema_version": 1,
        "folder": str(run.folder),
        "state": run.state,
        "slot": run.running,
        "activity": run.activity() or None,
        "training": training.slot or None,
        "step": training.step or None,
        "evaluation": training.newest.get("evaluation"),
        "checkpoint": training.newest.get("checkpoint"),
        "measurements": {
            name: {"step": values[-1][0], "value": values[-1][1]}
            for name, values in training.measured.items()
        },
        "mean_tokens_per_second": training.speed.mean("tokens_per_second"),
        "seconds_left": run.seconds_left,
        "ended_early": training.ended_early or None,
    }


def _draw(run: Run, *, follow: bool) -> None:
    import sys

    from rich.console import Console
    from rich.live import Live

    from pipeline.view.ending import next_lines
    from pipeline.view.live import ASCII, LABEL_WIDTH, UNICODE, Header, drawing

    console = Console(file=bare(sys.stdout), highlight=False)
    marks = ASCII if console.options.ascii_only else UNICODE

    def picture() -> object:
        header = Header(name=run.folder.resolve().name, where=run.state)
        return drawing(header, run, [], width=console.width, marks=marks)

    if not follow or not console.is_terminal:
        console.print(picture())
    else:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                run.look()
                live.update(picture(), refresh=True)  # type: ignore[arg-type]
                if run.state != "running":
                    break
                time.sleep(0.5)
    lines = next_lines(run.folder, run.state)
    width = max([LABEL_WIDTH, *(len(label) for label, _ in lines)])
    for label, text in lines:
        click.echo(shown(f"{label:<{width}}  {text}"))  # whole, so that it can be copied


@click.command("logs")
@run_argument()
@click.option("--rank", type=Count(min=0), default=0, show_default=True, help="Rank to print.")
@click.option("-f", "--follow", is_flag=True, help="Print new lines until RUN ends.")
@click.option("-n", "--lines", type=Count(min=0), help="Print the last N lines only.")
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

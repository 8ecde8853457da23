"""`pipe status` and `pipe logs`."""

from __future__ import annotations

import io
import json
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.commands.completion import RUN

if TYPE_CHECKING:
    from pipeline.view.follow import Follower


@click.command("status")
@click.argument(
    "run", metavar="[RUN]", type=click.Path(path_type=Path), required=False, shell_complete=RUN
)
@click.option("-f", "--follow", is_flag=True, help="Go on showing it until the run ends.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def status(run: Path | None, follow: bool, as_json: bool) -> None:
    """Show where RUN is (by default the newest in ./runs), from any terminal that sees its folder.

    Training does not notice.
    """
    from pipeline.errors import RecipeError
    from pipeline.execution import rundir
    from pipeline.recipe import read_recipe
    from pipeline.view.follow import Follower

    if follow and as_json:
        raise click.UsageError("--follow excludes --json")
    folder = rundir.existing(run or rundir.newest(Path("runs")))
    recipe, problems = read_recipe(folder / rundir.RECIPE)  # its variables may not be set here
    if recipe is None:
        raise RecipeError(problems)
    found = Follower(folder, {slot: spec.use for slot, spec in recipe.stages.items()})
    found.look()
    if as_json:
        click.echo(json.dumps(_facts(found), indent=1, allow_nan=False))
        return
    _draw(found, follow=follow)


def _facts(run: Follower) -> dict[str, object]:
    running = run.chain.running
    return {
        "schema_version": 1,
        "folder": str(run.folder),
        "state": run.state,
        "slot": running and running.slot,
        "activity": run.activity() or None,
        "step": run.step or None,
        "evaluation": run.evaluation or None,
        "checkpoint": run.saved or None,
        "seconds_left": run.seconds_left,
    }


def _draw(run: Follower, *, follow: bool) -> None:
    import sys

    from rich.console import Console
    from rich.live import Live

    from pipeline.utils.terminal import bare
    from pipeline.view.live import ASCII, UNICODE, Header, drawing

    console = Console(file=bare(sys.stdout), highlight=False)
    marks = ASCII if console.options.ascii_only else UNICODE

    def picture() -> object:
        header = Header(name=run.folder.resolve().name, where=run.state)
        return drawing(header, run, [], width=console.width, marks=marks)

    if not follow or not console.is_terminal:
        console.print(picture())
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            run.look()
            live.update(picture(), refresh=True)  # type: ignore[arg-type]
            if run.state != "running":
                return
            time.sleep(0.5)


@click.command("logs")
@click.argument(
    "run", metavar="[RUN]", type=click.Path(path_type=Path), required=False, shell_complete=RUN
)
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("-f", "--follow", is_flag=True, help="Go on with what is added, until the run ends.")
@click.option("-n", "--lines", type=click.IntRange(min=0), help="Only the last so many lines.")
def logs(run: Path | None, rank: int, follow: bool, lines: int | None) -> None:
    """Print the log of a rank of RUN (by default the newest in ./runs)."""
    from pipeline.errors import UsageError, system_errors_as
    from pipeline.execution import rundir
    from pipeline.utils.foreign import open_regular
    from pipeline.utils.text import did_you_mean

    folder = rundir.existing(run or rundir.newest(Path("runs")))
    file = folder / "logs" / f"rank-{rank:05d}.log"
    if not file.is_file():
        ranks = sorted(str(int(one.stem[5:])) for one in (folder / "logs").glob("rank-*.log"))
        raise UsageError(f"{folder} has no log of rank {rank}", hint=did_you_mean("", ranks))
    with system_errors_as(UsageError):
        opened = open_regular(file, within=folder)
        log = io.TextIOWrapper(opened, encoding="utf-8", errors="replace")
    with log:
        newest = deque(log, maxlen=lines)
        click.echo("".join(newest), nl=False)
        while follow and rundir.is_locked(folder):
            click.echo(log.read(), nl=False)
            time.sleep(0.2)
        click.echo(log.read(), nl=False)

"""`pipe resume`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("resume")
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
def resume(run_dir: Path, overrides: tuple[str, ...]) -> None:
    """Continue RUN at its first unfinished stage, training from its newest checkpoint.

    OVERRIDES change the run's recipe for good; stages that they concern run again.
    """
    from pipeline import rundir
    from pipeline.launch.start import start
    from pipeline.plan import make_plan
    from pipeline.recipe import load_recipe

    folder = rundir.existing(run_dir)
    loaded = load_recipe(folder / rundir.RECIPE, overrides)
    start(loaded, make_plan(loaded, here=True), lambda: folder)

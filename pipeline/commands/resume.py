"""`pipe resume`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pipeline.plan import Plan


@click.command("resume")
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
def resume(run_dir: Path, overrides: tuple[str, ...]) -> None:
    """Continue RUN at its first unfinished stage, training from its newest checkpoint.

    OVERRIDES change the run's recipe for good. Stages that they concern run again; training goes on
    from its newest checkpoint under the new settings.
    """
    from pipeline import rundir
    from pipeline.launch.environment import worker_world_size
    from pipeline.launch.start import start
    from pipeline.plan import plan_file

    def prepare() -> tuple[Plan, Path]:
        folder = rundir.existing(run_dir).resolve()
        recipe = folder / rundir.RECIPE
        return plan_file(recipe, overrides, here=True, procs=worker_world_size()), folder

    start(prepare)

"""`pipe run`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pipeline.plan import Plan


@click.command("run")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option("--run-dir", type=click.Path(path_type=Path), help="The run's folder itself.")
@click.option(
    "--runs",
    type=click.Path(path_type=Path),
    default="runs",
    show_default=True,
    help="Where the run's folder NAME-TIME is made.",
)
@click.option(
    "--plan",
    "planned",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A plan saved by `pipe plan --out`: refuse to run anything else (exit code 4).",
)
def run(
    recipe: Path,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    runs: Path,
    planned: Path | None,
) -> None:
    """Carry out RECIPE, from loading the model to exporting it.

    OVERRIDES change the recipe, as in train.steps=50 wrap.stage=2.
    """
    from pipeline import rundir
    from pipeline.launch.environment import (
        is_worker,
        worker_local_world_size,
        worker_world_size,
    )
    from pipeline.launch.start import start
    from pipeline.plan import plan_file
    from pipeline.saved_plan import require_planned

    def prepare() -> tuple[Plan, Path]:
        plan = plan_file(recipe, overrides, here=True, procs=worker_world_size())
        if planned is not None:
            per_node = worker_local_world_size() if is_worker() else plan.view.procs
            require_planned(plan, per_node, planned)
        folder = rundir.claim(run_dir) if run_dir else rundir.create(runs, plan.recipe.name)
        click.echo(f"run folder: {folder}")
        return plan, folder.resolve()

    start(prepare)

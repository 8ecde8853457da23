"""`pipe run`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pipeline.plan.plan import Plan


@click.command("run")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="The run's folder itself. If it holds a run, go on with that under RECIPE.",
)
@click.option("--fresh", is_flag=True, help="Refuse a --run-dir that holds a run (exit code 2).")
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
    fresh: bool,
    runs: Path,
    planned: Path | None,
) -> None:
    """Carry out RECIPE, from loading the model to exporting it.

    OVERRIDES change the recipe, as in train.steps=50 wrap.stage=2.
    """
    from pipeline.distributed.environment import (
        is_worker,
        worker_local_world_size,
        worker_world_size,
    )
    from pipeline.launch.start import start
    from pipeline.plan.plan import plan_file
    from pipeline.run import rundir
    from pipeline.run.saved_plan import require_planned

    def prepare() -> tuple[Plan, Path]:
        plan = plan_file(recipe, overrides, here=True, procs=worker_world_size())
        if planned is not None:
            per_node = worker_local_world_size() if is_worker() else plan.view.procs
            require_planned(plan, per_node, planned)
        if run_dir is None:
            folder = rundir.create(runs, plan.recipe.name)
        else:
            folder = rundir.claim(run_dir, fresh=fresh)
        click.echo(f"run folder: {folder}")
        return plan, folder.resolve()

    start(prepare)


ACCEPTABLE = (
    "model", "weights", "tokenizer", "data", "seed", "shuffle", "global_batch_size", "precision"
)  # fmt: skip
"""The parts of a checkpoint's origin, and fewer bits of its masters."""


@click.command("resume")
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option(
    "--recipe",
    type=click.Path(path_type=Path),
    help="Continue under this recipe instead of the run's own: another strategy, other hardware.",
)
@click.option(
    "--accept",
    type=click.Choice(ACCEPTABLE),
    multiple=True,
    help="Continue although this part of the training has changed. May be repeated.",
)
def resume(
    run_dir: Path, overrides: tuple[str, ...], recipe: Path | None, accept: tuple[str, ...]
) -> None:
    """Continue RUN at its first unfinished stage, training from its newest checkpoint.

    OVERRIDES change the run's recipe for good. Stages that they concern run again; training goes on
    from its newest checkpoint under the new settings. Another strategy, number of processes,
    micro-batch or accumulation continues the same training; another model, tokenizer, data, order
    or global batch is refused, unless it is named with --accept.
    """
    from pipeline.distributed.environment import worker_world_size
    from pipeline.launch.start import start
    from pipeline.plan.plan import plan_file
    from pipeline.run import rundir

    def prepare() -> tuple[Plan, Path]:
        folder = rundir.existing(run_dir).resolve()
        path = recipe or folder / rundir.RECIPE
        return plan_file(path, overrides, here=True, procs=worker_world_size()), folder

    start(prepare, accept)

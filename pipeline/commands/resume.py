"""`pipe resume`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pipeline.plan import Plan

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
    help="Go on under this recipe instead of the run's own: another strategy, other hardware.",
)
@click.option(
    "--accept",
    type=click.Choice(ACCEPTABLE),
    multiple=True,
    help="Go on although this part of the training is another than before. May be repeated.",
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
    from pipeline import rundir
    from pipeline.launch.environment import worker_world_size
    from pipeline.launch.start import start
    from pipeline.plan import plan_file

    def prepare() -> tuple[Plan, Path]:
        folder = rundir.existing(run_dir).resolve()
        path = recipe or folder / rundir.RECIPE
        return plan_file(path, overrides, here=True, procs=worker_world_size()), folder

    start(prepare, accept)

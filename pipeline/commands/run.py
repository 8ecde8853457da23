"""`pipe run`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.commands.completion import OVERRIDE, RECIPE, RUN
from pipeline.commands.display import display_options
from pipeline.commands.pinned import pinned_option
from pipeline.commands.selection import selection_options
from pipeline.commands.trust import trust_options

if TYPE_CHECKING:
    from pipeline.chain.plan import Plan, Started
    from pipeline.execution.selection import Selection
    from pipeline.view.screen import Display


def node_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say which of several nodes this is."""
    for option in (
        click.option(
            "--hostfile",
            type=click.Path(path_type=Path, dir_okay=False),
            help="DeepSpeed's list of nodes: `HOST slots=N` a line; node 0 comes first.",
        ),
        click.option(
            "--rdzv", metavar="HOST:PORT", help="Address of node 0, where the nodes meet."
        ),
        click.option("--node-rank", type=click.IntRange(0), help="Number of this node, from 0."),
        click.option(
            "--nodes",
            metavar="N|MIN:MAX",
            help="Number of nodes; this command is started on each. With MIN:MAX the run goes on "
            "with those that are left.",
        ),
    ):
        command = option(command)
    return command


@click.command("run")
@click.argument("recipe", type=click.Path(path_type=Path), shell_complete=RECIPE)
@click.argument("overrides", nargs=-1, shell_complete=OVERRIDE)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="The run's folder itself. If it holds a run, go on with that under RECIPE.",
)
@click.option("--group", help="Let the members of this group read the run's folder.")
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
@node_options
@selection_options
@click.option("-n", "--dry-run", is_flag=True, help="Say what would run, and run nothing.")
@pinned_option
@display_options
@trust_options
def run(
    recipe: Path,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    group: str | None,
    fresh: bool,
    runs: Path,
    planned: Path | None,
    selection: Selection,
    dry_run: bool,
    display: Display,
    **where: Any,
) -> None:
    """Carry out RECIPE, from loading the model to exporting it.

    OVERRIDES change the recipe, as in train.steps=50 wrap.stage=2.
    """
    from pipeline.chain.plan import Started, plan_file
    from pipeline.distributed.environment import is_worker, worker_local_world_size
    from pipeline.distributed.placement import NodeOptions
    from pipeline.execution import rundir
    from pipeline.execution.rank_logging import say
    from pipeline.execution.rehearsal import rehearsal
    from pipeline.execution.saved_plan import require_planned
    from pipeline.launch.start import Job, start

    def plan(started: Started) -> Plan:
        made = plan_file(recipe, overrides, here=True, started=started)
        selection.again(made)  # a slot that is not there is a mistake
        if planned is not None:
            per_node = worker_local_world_size() if is_worker() else made.per_node
            require_planned(made, per_node, planned)
        return made

    def folder(made: Plan) -> Path:
        if run_dir is None:
            found = rundir.create(runs, made.recipe.name)
        else:
            found = rundir.claim(run_dir, fresh=fresh)
        if group is not None:
            rundir.open_to(found, group)
        say(f"run folder: {found}")
        return found.resolve()

    if dry_run:
        made = plan(Started())
        if run_dir is not None:
            rundir.require_free(run_dir, fresh=fresh)
        click.echo("\n".join(rehearsal(made, run_dir, selection)))
        return
    with with_plan(plan) as kept:
        job = Job(
            plan=kept, folder=folder, display=display, selection=selection, beside=beside_on_gpus,
            begun=run_dir,
        )  # fmt: skip
        start(job, NodeOptions(**where))


def beside_on_gpus(plan: Plan, folder: Path) -> AbstractContextManager[None]:
    """Plan a run on GPUs while the body runs it; their hosts have cores to spare."""
    if plan.view.device == "cpu":
        return contextlib.nullcontext()
    from pipeline.planning.beside import planned_beside

    return planned_beside(plan, folder)


@contextlib.contextmanager
def with_plan(make: Callable[[Started], Plan]) -> Iterator[Callable[[Started], Plan]]:
    """Where the body, which makes its plan by the yielded function, runs out of memory, say what
    that plan is."""
    from pipeline.errors import PipeError, RunFailed

    made: list[Plan] = []

    def kept(started: Started) -> Plan:
        made.append(make(started))
        return made[-1]

    try:
        yield kept
    except RunFailed as error:
        if not error.memory:
            raise
        from pipeline.distributed.environment import started
        from pipeline.planning.beside import estimated
        from pipeline.planning.report import lines

        try:
            plan = made[-1] if made else make(started())  # a rank above 0 has made none
            planned = ["the plan:", *lines(estimated(plan))]
        except PipeError as reason:
            planned = [f"there is no plan: {str(reason).splitlines()[0]}"]
        raise RunFailed("\n  ".join([str(error), *planned])) from error


ACCEPTABLE = (
    "model", "weights", "tokenizer", "data", "seed", "shuffle", "global_batch_size", "precision"
)  # fmt: skip
"""The parts of a checkpoint's origin, and fewer bits of its masters."""


@click.command("resume")
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path), shell_complete=RUN)
@click.argument("overrides", nargs=-1, shell_complete=OVERRIDE)
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
@node_options
@selection_options
@click.option("-n", "--dry-run", is_flag=True, help="Say what would run, and run nothing.")
@pinned_option
@display_options
@trust_options
def resume(
    run_dir: Path,
    overrides: tuple[str, ...],
    recipe: Path | None,
    accept: tuple[str, ...],
    selection: Selection,
    dry_run: bool,
    display: Display,
    **where: Any,
) -> None:
    """Continue RUN at its first unfinished stage, training from its newest checkpoint.

    OVERRIDES change the run's recipe for good. Stages that they concern run again; training goes on
    from its newest checkpoint under the new settings. Another strategy, number of processes,
    micro-batch or accumulation continues the same training; another model, tokenizer, data, order
    or global batch is refused, unless it is named with --accept.
    """
    from pipeline.chain.plan import Started, plan_file
    from pipeline.distributed.placement import NodeOptions
    from pipeline.execution import rundir
    from pipeline.execution.rehearsal import rehearsal
    from pipeline.launch.start import Job, start

    def plan(started: Started) -> Plan:
        path = recipe or rundir.existing(run_dir) / rundir.RECIPE
        made = plan_file(path, overrides, here=True, started=started)
        selection.again(made)
        return made

    def folder(_: Plan) -> Path:
        return rundir.existing(run_dir).resolve()

    if dry_run:
        click.echo("\n".join(rehearsal(plan(Started()), run_dir, selection)))
        return
    with with_plan(plan) as kept:
        job = Job(
            plan=kept, folder=folder, display=display, accept=accept, selection=selection,
            beside=beside_on_gpus, begun=run_dir,
        )  # fmt: skip
        start(job, NodeOptions(**where))

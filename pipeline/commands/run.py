"""`pipe run`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.commands.options import (
    Count,
    display_options,
    dry_run_option,
    overrides_argument,
    pinned_option,
    recipe_argument,
    run_argument,
    runs_option,
    selection_options,
    trust_options,
)
from pipeline.errors import PipeError, RunFailed
from pipeline.execution.rank_logging import say

if TYPE_CHECKING:
    from pipeline.chain.plan import Plan
    from pipeline.distributed.launch import LaunchInfo
    from pipeline.execution.resume import Selection
    from pipeline.launch.job import Job
    from pipeline.view.display import Display


def start_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of both commands: which of several nodes this is, the part of the chain to
    do, what is shown and what is trusted."""
    for add in (
        trust_options,
        display_options,
        pinned_option,
        dry_run_option,
        selection_options,
        click.option(
            "--hostfile",
            type=click.Path(path_type=Path, dir_okay=False),
            help="DeepSpeed hostfile: one line `HOST slots=N` per node, node 0 first.",
        ),
        click.option(
            "--rdzv", metavar="HOST:PORT", help="Address of node 0, to which all nodes connect."
        ),
        click.option("--node-rank", type=Count(0), help="Rank of this node, from 0."),
        click.option(
            "--nodes",
            metavar="N|MIN:MAX",
            help="Number of nodes; start the same command on each. With MIN:MAX the run continues "
            "with the nodes that remain.",
        ),
    ):
        command = add(command)
    return command


@click.command("run")
@recipe_argument
@overrides_argument
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Folder of the run. If it holds a run, continue that run under RECIPE.",
)
@click.option("--group", help="Let members of this group read the run's folder.")
@click.option("--fresh", is_flag=True, help="Refuse a --run-dir that already holds a run.")
@runs_option("Folder in which to create the run's folder NAME-TIME.")
@click.option(
    "--plan",
    "planned",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Plan of `pipe plan --out`: refuse to run anything else (exit code 4).",
)
@start_options
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
    """Run all stages of RECIPE, from loading the model to exporting it.

    OVERRIDES change the recipe first, such as train.steps=50 wrap.stage=2.
    """
    from pipeline.chain.plan import resolved
    from pipeline.distributed.environment import is_worker
    from pipeline.distributed.launch import LaunchInfo
    from pipeline.execution import rundir
    from pipeline.execution.journal import Journal
    from pipeline.execution.resume import preview_lines
    from pipeline.execution.saved_plan import require_planned
    from pipeline.importing.unknown_keys import plan_recipe
    from pipeline.launch.job import Job

    def plan(started: LaunchInfo) -> Plan:
        made = plan_recipe(recipe, overrides, for_this_machine=True, started=started)
        selection.again(made)  # a slot that is not there is a mistake
        if planned is not None:
            known = Journal(run_dir / rundir.JOURNAL).state().commits if run_dir else {}
            made = resolved(made, known)
            per_node = started.per_node if is_worker() else made.per_node
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
        made = plan(LaunchInfo())
        if run_dir is not None:
            rundir.require_free(run_dir, fresh=fresh)
        click.echo("\n".join(preview_lines(made, run_dir, selection)))
        return
    job = Job(plan=plan, folder=folder, display=display, selection=selection, begun=run_dir)
    _start(job, where)


def _start(job: Job, where: dict[str, Any]) -> None:
    """Start a job on this node. Where it runs out of memory, say what its plan is."""
    from pipeline.distributed.placement import NodeOptions
    from pipeline.launch.start import start

    with with_plan(job.plan) as kept:
        start(replace(job, plan=kept, beside=beside_on_gpus), NodeOptions(**where))


def beside_on_gpus(plan: Plan, folder: Path) -> AbstractContextManager[None]:
    """Plan a run on GPUs while the body runs it; their hosts have cores to spare."""
    if plan.view.device == "cpu":
        return contextlib.nullcontext()
    from pipeline.planning.beside import planned_beside

    return planned_beside(plan, folder)


@contextlib.contextmanager
def with_plan(make: Callable[[LaunchInfo], Plan]) -> Iterator[Callable[[LaunchInfo], Plan]]:
    """Where the body, which makes its plan by the yielded function, runs out of memory, say what
    that plan is."""
    made: list[Plan] = []

    def kept(started: LaunchInfo) -> Plan:
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
@run_argument("run_dir")
@overrides_argument
@click.option(
    "--recipe",
    type=click.Path(path_type=Path),
    help="Continue under this recipe, not the run's own: another strategy, other hardware.",
)
@click.option(
    "--accept",
    type=click.Choice(ACCEPTABLE),
    multiple=True,
    help="Continue even if this part of the training has changed. May be repeated.",
)
@start_options
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
    """Continue RUN, by default the newest run in ./runs, where it stopped.

    Finished stages are skipped; training continues from its newest checkpoint. OVERRIDES change the
    run's recipe permanently, and the stages that they affect run again. The strategy, the number of
    processes, the micro-batch size and the accumulation may change. A different model, tokenizer,
    data, order or global batch is refused unless --accept names it.
    """
    from pipeline.distributed.launch import LaunchInfo
    from pipeline.execution import rundir
    from pipeline.execution.resume import preview_lines
    from pipeline.importing.unknown_keys import plan_recipe
    from pipeline.launch.job import Job

    def plan(started: LaunchInfo) -> Plan:
        path = recipe or rundir.existing(run_dir) / rundir.RECIPE
        made = plan_recipe(path, overrides, for_this_machine=True, started=started)
        selection.again(made)
        return made

    def folder(_: Plan) -> Path:
        return rundir.existing(run_dir).resolve()

    if dry_run:
        click.echo("\n".join(preview_lines(plan(LaunchInfo()), run_dir, selection)))
        return
    job = Job(
        plan=plan, folder=folder, display=display, accept=accept, selection=selection, begun=run_dir
    )
    _start(job, where)

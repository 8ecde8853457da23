"""`pipe run` and `pipe resume`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.commands import options
from pipeline.commands.options import FILE, PATH, Count, flag, option
from pipeline.errors import PipeError, RunFailed
from pipeline.execution.rank_logging import say

if TYPE_CHECKING:
    from pipeline.chain.plan import Plan
    from pipeline.distributed.settings import ProcessCounts
    from pipeline.execution.resume import Selection
    from pipeline.view.screen import Display

start_options = options.together(
    option("--nodes", "Number of nodes; start the same command on each.", metavar="N"),
    option("--node-rank", "Rank of this node, from 0.", type=Count(0)),
    option("--rdzv", "Address of node 0, to which all nodes connect.", metavar="HOST:PORT"),
    option("--hostfile", "DeepSpeed hostfile: one line `HOST slots=N` per node, node 0 first.",
           type=FILE),
    option("--engine", "Engine that starts the ranks: Ray Train. Sets launch.engine.",
           type=click.Choice(["ray"])),
    option("--address", "Address of the engine's cluster.", metavar="HOST:PORT",
           show_default="$RAY_ADDRESS, the one on this machine, or a new one"),
    options.selection, options.dry_run, options.pinned, options.display, options.trust,
)  # fmt: skip
"""Options of both commands; `_start` takes their values."""


@click.command("run")
@options.recipe
@option("--run-dir", "Folder of the run. If it holds a run, continue that run under RECIPE.",
        type=PATH)  # fmt: skip
@option("--group", "Let members of this group read the run's folder.")
@flag("--fresh", "Refuse a --run-dir that already holds a run.")
@options.runs_folder("Folder in which to create the run's folder NAME-TIME.")
@option("--plan", "planned",
        "Plan of `pipe plan --out`: refuse to run anything else (exit code 4).",
        type=FILE)  # fmt: skip
@start_options
def run(
    recipe: Path, overrides: tuple[str, ...], run_dir: Path | None, group: str | None, fresh: bool,
    runs: Path, planned: Path | None, selection: Selection, dry_run: bool, engine: str | None,
    address: str | None, **start: Any,
) -> None:  # fmt: skip
    """Run all stages of RECIPE, from loading the model to exporting it.

    OVERRIDES change the recipe first, such as train.steps=50 wrap.stage=2.
    """
    from pipeline.chain.plan import resolved
    from pipeline.distributed.environment import is_worker
    from pipeline.execution import rundir
    from pipeline.execution.journal import Journal
    from pipeline.execution.saved_plan import require_planned
    from pipeline.importing.translator import plan_recipe

    overrides = _under(engine, address, overrides)

    def plan(started: ProcessCounts) -> Plan:
        made = plan_recipe(recipe, overrides, for_this_machine=True, started=started)
        selection.require_known(made)  # a slot that is not there is a mistake
        if planned is not None:
            known = Journal(run_dir / rundir.JOURNAL).state().commits if run_dir else {}
            made = resolved(made, known)  # resolved early: --plan compares commits
            per_node = started.per_node if is_worker() else made.per_node
            require_planned(made, per_node, planned)
        if dry_run and run_dir is not None:
            rundir.require_free(run_dir, fresh=fresh)
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

    _start(plan, folder, run_dir, selection, dry_run, **start)


ACCEPTABLE = (
    "model", "weights", "tokenizer", "data", "seed", "shuffle", "global_batch_size", "precision"
)  # fmt: skip
"""The parts of a checkpoint's origin, and fewer bits of its masters."""


@click.command("resume")
@options.run("run_dir")
@options.overrides
@option("--recipe",
        "Continue under this recipe, not the run's own: another strategy, other hardware.",
        type=PATH)  # fmt: skip
@option("--accept", "Continue even if this part of the training has changed. May be repeated.",
        type=click.Choice(ACCEPTABLE), multiple=True)  # fmt: skip
@start_options
def resume(
    run_dir: Path, overrides: tuple[str, ...], recipe: Path | None, selection: Selection,
    engine: str | None, address: str | None, **start: Any,
) -> None:  # fmt: skip
    """Continue RUN, by default the newest run in ./runs, where it stopped.

    Finished stages are skipped; training continues from its newest checkpoint. OVERRIDES change the
    run's recipe permanently, and the stages that they affect run again. The strategy, the number of
    processes, the micro-batch size and the accumulation may change. A different model, tokenizer,
    data, order or global batch is refused unless --accept names it.
    """
    from pipeline.execution import rundir
    from pipeline.importing.translator import plan_recipe

    overrides = _under(engine, address, overrides)

    def plan(started: ProcessCounts) -> Plan:
        path = recipe or rundir.existing(run_dir) / rundir.RECIPE
        made = plan_recipe(path, overrides, for_this_machine=True, started=started)
        selection.require_known(made)
        return made

    def folder(_: Plan) -> Path:
        return rundir.existing(run_dir).resolve()

    _start(plan, folder, run_dir, selection, **start)


def _under(engine: str | None, address: str | None, overrides: tuple[str, ...]) -> tuple[str, ...]:
    """The overrides with the engine; its cluster's address goes into Ray's own variable."""
    if address is not None:
        os.environ["RAY_ADDRESS"] = address
    return overrides if engine is None else (*overrides, f"launch.engine={engine}")


def _start(
    plan: Callable[[ProcessCounts], Plan], folder: Callable[[Plan], Path],
    earlier_folder: Path | None, selection: Selection, dry_run: bool, display: Display,
    accept: tuple[str, ...] = (), **where: Any,
) -> None:  # fmt: skip
    """Start a run on this node; with `dry_run`, which is not the recipe's, print what would run."""
    from pipeline.distributed.placement import NodeOptions
    from pipeline.distributed.settings import ProcessCounts
    from pipeline.execution.resume import preview_lines
    from pipeline.launch.job import Job
    from pipeline.launch.start import start

    if dry_run:
        click.echo("\n".join(preview_lines(plan(ProcessCounts()), earlier_folder, selection)))
        return
    with plan_shown_if_out_of_memory(plan) as kept:
        job = Job(
            plan=kept, folder=folder, display=display, accept=accept, selection=selection,
            earlier_folder=earlier_folder, meanwhile=_beside_on_gpus,
        )  # fmt: skip
        start(job, NodeOptions(**where))


def _beside_on_gpus(plan: Plan, folder: Path) -> contextlib.AbstractContextManager[None]:
    """Plan a run on GPUs while the body runs it; their hosts have cores to spare."""
    if plan.view.device == "cpu":
        return contextlib.nullcontext()
    from pipeline.planning.beside import planned_beside

    return planned_beside(plan, folder)


@contextlib.contextmanager
def plan_shown_if_out_of_memory(
    make: Callable[[ProcessCounts], Plan],
) -> Iterator[Callable[[ProcessCounts], Plan]]:
    """Yield `make`. If the run in the body fails for lack of memory, add the plan that `make` made
    to the error's text."""
    made: list[Plan] = []

    def kept(started: ProcessCounts) -> Plan:
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

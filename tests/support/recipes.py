"""Run whole recipes inside a test's own processes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from pipeline.chain.plan import plan_file
from pipeline.distributed.process_group import DistContext
from pipeline.distributed.settings import ProcessCounts
from pipeline.execution.journal import Journal
from pipeline.execution.resume import plan_resume
from pipeline.execution.run_spec import steps_of
from pipeline.execution.runner import Runner
from tests.support.runs import context


def run_recipe(dist: DistContext, recipe: str, folder: str, overrides: Sequence[str] = ()) -> None:
    """Run all stages of the recipe on this rank; `folder` is the run's."""
    plan = plan_file(recipe, list(overrides), started=ProcessCounts(procs=dist.world_size))
    ctx = context(dist, folder, plan.recipe.seed)
    with contextlib.ExitStack() as stack:
        ctx.on_exit = stack.callback
        journal = Journal(Path(folder) / "journal.jsonl")
        found = plan_resume(plan, journal)
        runner = Runner(steps_of(plan), ctx, journal, dry_run=plan.recipe.dry_run)
        stack.callback(runner.close)
        runner.run(found.run, found.restore)

"""Start a run in its folder: as the launching process, or as one rank under another launcher."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline import failure, rundir
from pipeline.errors import PipeError
from pipeline.journal import Journal
from pipeline.launch.environment import is_worker
from pipeline.plan import Plan
from pipeline.recipe import Recipe


def start(recipe: Recipe, plan: Plan, find_folder: Callable[[], Path]) -> Path:
    """Run `plan` to its end in the folder that `find_folder` makes or finds; return the folder.

    `find_folder` is called once in the whole run. Raises RunFailed, RunLocked or UsageError.
    """
    if is_worker():
        return _start_as_rank(recipe, plan, find_folder)
    from pipeline.launch.local import launch

    folder = find_folder().resolve()
    with _opened(recipe, plan, folder):
        launch(plan, folder)
    return folder


def _start_as_rank(recipe: Recipe, plan: Plan, find_folder: Callable[[], Path]) -> Path:
    from pipeline.dist import environment_dist
    from pipeline.worker import run_rank

    dist = environment_dist(device=plan.view.device)
    with contextlib.ExitStack() as stack:
        shared = None
        if dist.is_main:
            shared = str(find_folder().resolve())
            stack.enter_context(_opened(recipe, plan, Path(shared)))
        folder = Path(dist.share(shared))
        run_rank(folder)
    return folder


@contextlib.contextmanager
def _opened(recipe: Recipe, plan: Plan, folder: Path) -> Iterator[None]:
    """Hold the folder's lock, record what starts and how it ends."""
    journal = Journal(folder / rundir.JOURNAL)
    with rundir.locked(folder):
        rundir.write_recipe(folder, recipe.dump())
        rundir.write_environment(folder)
        failure.clear(folder)
        journal.write("run started", procs=plan.view.procs, device=plan.view.device)
        try:
            yield
        except PipeError as error:
            journal.write("run failed", problem=str(error))
            raise
        except BaseException as error:
            journal.write("run stopped", problem=type(error).__name__)
            raise
        journal.write("run finished")

"""One rank of a run: `python -m pipeline.worker RUN_DIR` under the launcher's environment."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from pipeline import failure, rundir
from pipeline.dist import Dist, environment_dist
from pipeline.journal import Journal
from pipeline.metrics import Metrics
from pipeline.plan import Plan, make_plan
from pipeline.recipe import load_recipe
from pipeline.runner import Runner
from pipeline.stage import Context

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    """Entry point of a launched rank; the exit code is 1 after a failure that has been recorded."""
    die_with_parent()
    run_dir = Path(argv[0])
    try:
        run_rank(run_dir)
    except Exception:
        return 1
    return 0


def die_with_parent() -> None:
    """Ask Linux to kill this process when its launcher dies, so that no rank is left behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run_rank(run_dir: Path) -> None:
    """Run the folder's recipe on this rank. A failure is recorded in the folder, then raised."""
    rank = int(os.environ.get("RANK", "0"))
    current: list[Context] = []
    try:
        with contextlib.ExitStack() as stack:
            plan = make_plan(load_recipe(run_dir / rundir.RECIPE), here=True)
            log = stack.enter_context(rank_log(run_dir, rank))
            dist = stack.enter_context(process_group(plan))
            ctx = Context(
                run_dir=run_dir,
                seed=plan.recipe.seed,
                dist=dist,
                log=log,
                metrics=Metrics(run_dir / rundir.METRICS if dist.is_main else None),
                on_exit=stack.callback,
            )
            current.append(ctx)
            Runner(plan, ctx, Journal(run_dir / rundir.JOURNAL)).run()
    except BaseException as error:
        slot = current[0].slot if current else "start"
        failure.record(run_dir, rank, slot, error)
        logging.getLogger("pipe").debug("failed", exc_info=True)
        raise


@contextlib.contextmanager
def process_group(plan: Plan) -> Iterator[Dist]:
    """This rank's process group for the time of the run."""
    import torch
    import torch.distributed

    if plan.recipe.launch.threads is not None:
        torch.set_num_threads(plan.recipe.launch.threads)
    dist = environment_dist(device=plan.view.device)
    try:
        yield dist
    finally:
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def rank_log(run_dir: Path, rank: int) -> Iterator[logging.Logger]:
    """The run's logger: rank 0 speaks on screen, every rank writes its own file.

    Other ranks' raw output goes to their file too, so that one run has one voice.
    """
    folder = run_dir / "logs"
    folder.mkdir(exist_ok=True)
    path = folder / f"rank-{rank:05d}.log"
    log = logging.getLogger("pipe")
    log.setLevel(logging.DEBUG)
    log.propagate = False
    to_file = logging.FileHandler(path, encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handlers: list[logging.Handler] = [to_file]
    if rank == 0:
        to_screen = logging.StreamHandler(sys.stdout)
        to_screen.setLevel(logging.INFO)
        handlers.append(to_screen)
    else:
        _redirect_output(path)
    for handler in handlers:
        log.addHandler(handler)
    try:
        yield log
    finally:
        for handler in handlers:
            log.removeHandler(handler)
            handler.close()


def _redirect_output(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Library threads still hold C++ state here, and tearing it down can abort a finished run.
    os._exit(code)

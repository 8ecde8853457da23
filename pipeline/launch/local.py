"""Start the ranks of a run on this machine with torch's elastic agent and wait for them."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from pathlib import Path

from pipeline import failure
from pipeline.errors import RunFailed
from pipeline.plan import Plan

SHUTDOWN_SECONDS = "10"
"""How long ranks get to end after the first failure, before they are killed."""


def launch(plan: Plan, run_dir: Path) -> None:
    """Run every rank to its end. Raises RunFailed with the first failing rank's error.

    No rank outlives this call: the agent stops the rest when one fails, and ranks die with it.
    """
    _set_threads(plan)
    if plan.view.procs == 1:
        _one(run_dir)
    else:
        _many(plan.view.procs, run_dir)


def _set_threads(plan: Plan) -> None:
    """Share the cores among local ranks unless the user decided otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        threads = plan.recipe.launch.threads or max(1, cores // plan.view.procs)
        os.environ["OMP_NUM_THREADS"] = str(threads)


def _one(run_dir: Path) -> None:
    from pipeline.worker import run_rank

    try:
        run_rank(run_dir)
    except Exception:
        raise failure.first(run_dir, {}) from None


def _many(procs: int, run_dir: Path) -> None:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_SECONDS)
    # The agent's own report of a failure is long and lacks the cause; ours follows.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=procs,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "pipeline.worker", str(run_dir))
    except ChildFailedError as error:
        codes = {rank: child.exitcode for rank, child in error.failures.items()}
        raise failure.first(run_dir, codes) from None
    except RuntimeError as error:
        raise RunFailed(f"the processes could not be started: {error}") from error

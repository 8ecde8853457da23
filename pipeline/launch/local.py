"""Start the ranks of a run on this machine with torch's elastic agent and wait for them."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import failure, rundir
from pipeline.errors import RunFailed
from pipeline.journal import Journal
from pipeline.launch.children import none_left
from pipeline.machine import cores_each
from pipeline.plan import Plan

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

SHUTDOWN_SECONDS = 10
"""How long ranks get to end when the run is stopped, before they are killed."""


def launch(plan: Plan, run_dir: Path, accept: Sequence[str] = ()) -> None:
    """Run every rank to its end. Raises RunFailed with the first failing rank's error.

    `accept` names changes that are intended. No rank outlives this call: the agent stops the rest
    when one fails, and ranks die with it.
    """
    _set_threads(plan)
    if plan.view.procs == 1:
        _one(run_dir, accept)
    else:
        with none_left():
            _many(plan.view.procs, run_dir, accept)


def _set_threads(plan: Plan) -> None:
    """Share the cores among the ranks unless the recipe or the environment has decided."""
    threads = plan.recipe.launch.threads
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(cores_each(plan.view.procs))


def _one(run_dir: Path, accept: Sequence[str]) -> None:
    from pipeline.worker import run_rank

    try:
        run_rank(run_dir, accept=accept)
    except (Exception, SystemExit) as error:
        if failure.first_rank(run_dir) is None:  # it could not be written down
            raise RunFailed(failure.describe(error)) from error
        raise failure.first(run_dir, []) from None


def _many(procs: int, run_dir: Path, accept: Sequence[str]) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    _silence_agent()
    # -P: what lies in the user's folder must not stand in for modules that ranks import
    command = ("-P", "-m", "pipeline.worker", str(run_dir), str(os.getpid()), *accept)
    with tempfile.TemporaryDirectory(prefix="pipe-") as folder:
        try:
            elastic_launch(_config(procs, folder), sys.executable)(*command)
        except ChildFailedError as error:
            exits = [
                failure.Exit(rank=rank, code=child.exitcode, time=child.timestamp)
                for rank, child in error.failures.items()
            ]
            slot = Journal(run_dir / rundir.JOURNAL).running()
            raise failure.first(run_dir, exits, slot) from None
        except (RuntimeError, OSError, RendezvousError) as error:
            raise RunFailed(f"the processes could not be started: {error}") from error


def _config(procs: int, folder: str) -> LaunchConfig:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=procs,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",  # this machine's own name need not resolve
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=SHUTDOWN_SECONDS,
        signals_to_handle="",  # ours stay in place; see launch/signals.py
        logs_specs=DefaultLogsSpecs(log_dir=folder),
    )


def _silence_agent() -> None:
    """The agent's own report of a failure is long and lacks the cause; ours follows it."""
    log = logging.getLogger("torch.distributed.elastic")
    log.addHandler(logging.NullHandler())
    log.propagate = False

"""Start a run in its folder: as the launching process, or as one rank under another launcher."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.distributed.environment import STOPPED, is_worker, started, worker_rank
from pipeline.distributed.launchers import placement, require_task
from pipeline.distributed.placement import NodeOptions, NodePlacement, RankPlacement, combined
from pipeline.distributed.settings import ProcessCounts
from pipeline.distributed.signals import Interrupted, default_signals, stoppable
from pipeline.errors import CommandStopped, JournalDamaged, RunStopped
from pipeline.execution import failures
from pipeline.execution.run_spec import RunSpec
from pipeline.launch.job import (
    Job,
    is_to_be_undone,
    left_to_run,
    recorded_start_and_end,
    say_undone,
)
from pipeline.recipe.nodes import texts_in
from pipeline.utils.files import cache_folder
from pipeline.utils.terminal import hide_environment, typed

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


SPEC_KEY = "pipe/spec"
"""Key under which rank 0 publishes the run's spec; an empty text when there is nothing to do."""


def start(job: Job, options: NodeOptions | None = None) -> None:
    """Run what is not done yet: all of it on this machine, one node's part of it, or one rank's,
    as the `options` and the environment say.

    Raises what the job's parts raise, RunLocked, RunFailed, RunStopped, and UsageError where the
    environment or the options contradict themselves.
    """
    hide_environment()
    keep_compiled()
    found = combined(options or NodeOptions(), placement(os.environ))
    if found is None:
        require_task(os.environ)
    scheduler_job = ""
    if isinstance(found, RankPlacement):
        os.environ |= found.environment()  # from here on is_worker() holds
        scheduler_job = found.job
    if worker_rank() > 0:
        # it learns from rank 0 where the run is, and need not see the recipe
        from pipeline.distributed.process_group import receive

        default_signals()
        store = _meet(scheduler_job)
        text = receive(store, SPEC_KEY)
        store.add(f"{SPEC_KEY}/received", 1)
        if text:
            _run_as_rank(RunSpec.load(text), store)
        return
    # torchrun waits 30 s for a rank that it stops; a rank can be in a collective that never ends.
    try:
        with stoppable(force_after=3.0 if is_worker() else None):
            if is_worker():
                _run_as_rank0(job, scheduler_job)
            elif isinstance(found, NodePlacement) and found.nodes > 1:
                from pipeline.launch.nodes import start_node

                start_node(job, found)
            else:
                _start_here(job, found.procs if isinstance(found, NodePlacement) else None)
    except CommandStopped as stopped:  # outside `recorded_start_and_end`: nothing was recorded
        raise RunStopped(str(stopped)) from None
    finally:
        if is_worker():  # libraries may hang in native code at the end, where Python handles none
            default_signals()


def keep_compiled() -> None:
    """Have torch keep compiled code, Triton's kernels too, where it outlives a restart of the
    machine, unless a folder is named already; its own is in /tmp. Read when something is compiled,
    in this process and those that it starts."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))


def _start_here(job: Job, procs: int | None) -> None:
    with job.locked_folder(ProcessCounts(per_node=procs)) as (plan, folder):
        left = left_to_run(plan, folder)
        if left is None:
            return
        with job.running(plan, folder) as screen:
            spec = RunSpec.of(plan, folder, job.accept).starting(left)
            if plan.recipe.launch.engine is not None:
                from pipeline.launch.ray_train import run_with_ray

                run_with_ray(plan, spec, screen)
            else:
                from pipeline.launch.ranks import run_with_restarts

                run_with_restarts(plan, spec, screen)


def _run_as_rank0(job: Job, scheduler_job: str) -> None:
    """Rank 0 under another launcher: it prepares the run, prints, and holds the lock."""
    with job.locked_folder(started()) as (plan, folder):
        store = _meet(scheduler_job)
        left = left_to_run(plan, folder)
        if left is None:
            _publish(store, "")
            return
        with recorded_start_and_end(plan, folder):
            spec = RunSpec.of(plan, folder, job.accept).starting(left)
            _publish(store, spec.dump())
            _run_as_rank(spec, store)


def _meet(scheduler_job: str) -> Store:
    """Meet the ranks of this job of a scheduler."""
    from pipeline.distributed.process_group import environment_store
    from pipeline.utils.processes import die_with

    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's own death must not leave this rank behind
        die_with(os.getppid())
    store = environment_store(job=scheduler_job)
    assert store is not None
    return store


def _publish(store: Store, spec: str) -> None:
    """Give all ranks the spec; return when they have it, as the store ends with this process."""
    store.set(SPEC_KEY, spec)
    others = int(os.environ["WORLD_SIZE"]) - 1
    while store.add(f"{SPEC_KEY}/received", 0) < others:
        time.sleep(0.05)


def _run_as_rank(spec: RunSpec, store: Store) -> None:
    """Run as a rank. The one that failed first reports that; the others leave with exit code 1."""
    from pipeline.execution.worker import run_rank

    folder = Path(spec.run_dir)
    typed(spec.run_dir, *texts_in(spec.recipe))  # a rank above 0 has read no recipe
    try:
        run_rank(spec, store)
    except Interrupted:
        if worker_rank() == 0:  # which records and reports it
            raise
        sys.exit(STOPPED)
    except (Exception, SystemExit):
        if failures.first_rank(folder) == worker_rank():
            error = failures.first(folder, [])
            with contextlib.suppress(OSError, JournalDamaged):
                if is_to_be_undone(folder):  # as rank 0 sees, too
                    say_undone(error, folder)
            raise error from None
        sys.exit(1)

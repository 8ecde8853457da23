"""One rank of a run, which `pipe` has started with a message (`pipeline.utils.processes`)."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.chain.plan import Plan
from pipeline.contracts.metrics import Metrics
from pipeline.contracts.stage import Context
from pipeline.distributed.environment import (
    DUMP,
    FINISHED,
    STOPPED,
    Shared,
    is_worker,
    join,
    shared,
    started,
    worker_rank,
)
from pipeline.distributed.heartbeat import LOOK_SECONDS, Watchdog
from pipeline.distributed.launch import Timeouts
from pipeline.distributed.process_group import DistContext, environment_dist, environment_store
from pipeline.distributed.signals import Interrupted, default_signals
from pipeline.errors import RunFailed, StageError
from pipeline.execution import failures, rundir
from pipeline.execution.activity_record import ActivityRecord
from pipeline.execution.agreement import require_same_recipe
from pipeline.execution.journal import Journal, warnings_in
from pipeline.execution.rank_logging import compilers_aside, open_log, rank_log
from pipeline.execution.run_spec import RunSpec, set_current
from pipeline.execution.runner import Runner
from pipeline.utils.activities import in_thread, show_in
from pipeline.utils.files import cache_folder
from pipeline.utils.packages import collect_as_usual, collect_rarely
from pipeline.utils.processes import received
from pipeline.utils.terminal import hide_environment, redact_output, set_display

if TYPE_CHECKING:
    import logging

    from torch.distributed.distributed_c10d import Store

CLEANUP_SECONDS = 5
"""Seconds that a failed rank gets to release what it holds: closing collectively can wait for ranks
that will never come."""


def main(argv: list[str]) -> int:
    """Entry point of a launched rank: its exit code, STOPPED if it was asked to end and has saved
    what it had, 1 after a failure that has been recorded."""
    message = received(argv[0], ends_with_parent=True)
    own, spec = Shared(**message["shared"]), RunSpec.load(message["spec"])
    join(own)
    default_signals()
    redact_output()
    hide_environment()
    set_display(spec.display)
    faulthandler.register(DUMP, own.stacks)
    run_dir = Path(spec.run_dir)
    try:
        faulthandler.enable(open_log(run_dir, worker_rank()))
    except StageError as error:
        failures.record(run_dir, worker_rank(), "", error)
        return 1
    try:
        run_rank(spec)
    except Interrupted:
        return STOPPED
    except BaseException:
        return 1
    return FINISHED


def run_rank(spec: RunSpec, store: Store | None = None) -> None:
    """Do this rank's part of a run. A failure is recorded in the run's folder, then raised.

    `store` is where the ranks have met, if they have.
    """
    rank, run_dir = worker_rank(), Path(spec.run_dir)
    set_current(spec)
    keep_compiled()
    collect_rarely()
    with rank_log(run_dir, rank) as log, contextlib.ExitStack() as stack:
        stack.callback(collect_as_usual)
        current: list[Context] = []
        try:
            plan = spec.plan(started(), for_this_machine=True)
            dist = stack.enter_context(process_group(plan, store))
            stack.enter_context(compilers_aside(log))
            ctx = context(plan, run_dir, dist, log)
            ctx.accept = frozenset(spec.accept)
            ctx.on_exit = stack.callback
            current.append(ctx)
            journal = Journal(run_dir / rundir.JOURNAL)
            if dist.is_main:
                stack.enter_context(warnings_in(journal, log))
            for warning in spec.warnings:
                log.warning("%s", warning)
            record = ActivityRecord(log, run_dir if dist.is_main else None)
            stack.enter_context(show_in(record))
            timeouts = plan.recipe.launch.timeouts
            stack.enter_context(watched(run_dir, dist, timeouts))
            require_same_recipe(plan, ctx)
            runner = Runner(plan, ctx, journal)
            stack.callback(runner.close)
            runner.run()
            stack.close()  # here, so that its errors are reported as well
        except Interrupted:
            raise
        except BaseException as error:
            slot = current[0].slot if current else ""
            failures.record(run_dir, rank, slot, _cause(run_dir, error))
            log.debug("failed", exc_info=True)
            if is_worker():
                with contextlib.suppress(StageError):  # the folder may be gone
                    faulthandler.dump_traceback_later(
                        CLEANUP_SECONDS, exit=True, file=open_log(run_dir, rank)
                    )
            raise


def _cause(run_dir: Path, error: BaseException) -> BaseException:
    """The error to report: a file that is missing since the run's folder is gone says only that."""
    if isinstance(error, FileNotFoundError):
        try:
            rundir.require_kept(run_dir)
        except RunFailed as gone:
            return gone
    return error


def keep_compiled() -> None:
    """Have torch keep compiled code, Triton's kernels too, where it outlives a restart of the
    machine, unless a folder is named already; its own is in /tmp. Read when something is compiled.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))


def context(plan: Plan, run_dir: Path, dist: DistContext, log: logging.Logger) -> Context:
    """Context of stages on this rank."""
    return Context(
        run_dir=run_dir,
        seed=plan.recipe.seed,
        dist=dist,
        log=log,
        metrics=Metrics(run_dir / rundir.METRICS if dist.is_main else None),
    )


@contextlib.contextmanager
def process_group(plan: Plan, store: Store | None) -> Iterator[DistContext]:
    """Open this rank's process group for the time of the run."""
    import torch
    import torch.distributed

    launch = plan.recipe.launch
    if launch.threads is not None:
        torch.set_num_threads(launch.threads)
    found = store or environment_store(launch.timeouts.rendezvous)
    dist = environment_dist(found, device=plan.view.device, timeout=launch.timeouts.collectives)
    try:
        yield dist
    finally:
        torch.distributed.destroy_process_group()


STOP_SECONDS = 20.0
"""Seconds that a rank which was asked to stop waits for others: one that has died never comes."""


@contextlib.contextmanager
def watched(run_dir: Path, dist: DistContext, timeouts: Timeouts) -> Iterator[None]:
    """End this process with exit code 1 and its stacks in its log if the body shows no sign of life
    for longer than `timeouts` say, or was asked to stop and waits for ranks that do not come. Does
    nothing under `pipe`, which watches its ranks itself."""
    if shared() is not None:
        yield
        return
    with in_thread(functools.partial(_watch, run_dir, dist, timeouts), "pipe-watch"):
        yield


def _watch(run_dir: Path, dist: DistContext, timeouts: Timeouts, over: threading.Event) -> None:
    watchdog, stopping = Watchdog([dist.heartbeat], [os.getpid()], timeouts), 0.0
    while not over.wait(LOOK_SECONDS):
        stopping += LOOK_SECONDS
        if not (dist.stop.asked and dist.heartbeat.read().waits):
            stopping = 0.0
        if stopping > STOP_SECONDS:
            _end(run_dir, dist.rank, "was asked to stop, and the others do not come")
        for stall in watchdog.stalled():
            _end(run_dir, dist.rank, stall.describe())


def _end(run_dir: Path, rank: int, problem: str) -> None:
    with contextlib.suppress(Exception):  # a disk that does not answer may be what it waits for
        failures.record(run_dir, rank, "", StageError(f"this rank {problem}"))
        with open_log(run_dir, rank) as log:
            faulthandler.dump_traceback(log)
    os._exit(1)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the terminal may be closed
            stream.flush()
    # Library threads still hold C++ state here, and tearing it down can abort a finished run.
    os._exit(code)

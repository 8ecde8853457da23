"""One rank of a run, which `pipe` has started with a message (`pipeline.utils.processes`)."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import logging
import os
import resource
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.chain.plan import impossible_here
from pipeline.contracts.metrics import Metrics
from pipeline.contracts.stage import Context
from pipeline.distributed import environment
from pipeline.distributed.heartbeat import LOOK_SECONDS, Watchdog
from pipeline.distributed.process_group import (
    DistContext,
    environment_dist,
    environment_store,
    leave,
)
from pipeline.distributed.settings import Launch, Timeouts
from pipeline.distributed.signals import Interrupted, default_signals
from pipeline.errors import Location, Problem, RecipeError, RunFailed, StageError
from pipeline.execution import failures, rundir
from pipeline.execution.journal import Journal, warnings_in
from pipeline.execution.rank_logging import ActivityRecord, compilers_aside, open_log, rank_log
from pipeline.execution.run_spec import RunSpec
from pipeline.execution.runner import Runner, require_same_recipe
from pipeline.utils.activities import in_thread, show_in
from pipeline.utils.packages import RARELY, gc_as_usual
from pipeline.utils.processes import received
from pipeline.utils.terminal import redact_output

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

CLEANUP_SECONDS = 5
"""Seconds that a failed rank gets to release what it holds: closing collectively can wait for ranks
that will never come."""


def main(argv: list[str]) -> int:
    """Entry point of a launched rank: its exit code, STOPPED if it was asked to end and has saved
    what it had, 1 after a failure that has been recorded."""
    message = received(argv[0], ends_with_parent=True)
    own, spec = environment.Shared(**message["shared"]), RunSpec(**message["spec"])
    environment.shared = own
    default_signals()
    redact_output(message["hidden"])
    faulthandler.register(environment.DUMP, own.stacks)
    run_dir = Path(spec.run_dir)
    with contextlib.suppress(StageError):  # `run_rank` records it
        faulthandler.enable(open_log(run_dir, environment.worker_rank()))
    try:
        run_rank(spec)
    except Interrupted:
        return environment.STOPPED
    except BaseException:
        return 1
    return environment.FINISHED


def run_rank(spec: RunSpec, store: Store | None = None) -> None:
    """Do this rank's part of a run. A failure is recorded in the run's folder, then raised.

    `store` is where the ranks have met, if they have.
    """
    rank, run_dir, own = environment.worker_rank(), Path(spec.run_dir), environment.shared
    over_network = own is None or own.store is None  # the ranks meet over TCP, not in a file
    log = logging.getLogger("pipe")
    ctx: Context | None = None
    gc.set_threshold(*RARELY)
    with contextlib.ExitStack() as stack:
        stack.callback(gc_as_usual)
        try:
            stack.enter_context(rank_log(run_dir, rank, spec.display))
            settings, steps = spec.build()
            launch = settings.launch
            if over_network:  # gloo connects each rank to every other
                _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            if store is not None:  # rank 0 has looked at its own machine only
                _require_possible(launch, run_dir)
            import torch
            import torch.distributed

            if launch.threads is not None:
                torch.set_num_threads(launch.threads)
            found = store or environment_store(launch.timeouts.rendezvous)
            seconds = launch.timeouts.collectives
            dist = environment_dist(found, device=spec.device, timeout=seconds)
            if over_network:
                stack.push(functools.partial(leave, dist))
            stack.callback(torch.distributed.destroy_process_group)
            stack.enter_context(compilers_aside(log))
            ctx = Context(
                run_dir=run_dir, seed=settings.seed, dist=dist, log=log,
                metrics=Metrics(run_dir / rundir.METRICS if dist.is_main else None),
                on_exit=stack.callback, accept=frozenset(spec.accept),
                spec=spec.dump() if dist.is_main else "",
            )  # fmt: skip
            journal = Journal(run_dir / rundir.JOURNAL)
            if dist.is_main:
                stack.enter_context(warnings_in(journal, log))
            for warning in spec.warnings:
                log.warning("%s", warning)
            stack.enter_context(show_in(ActivityRecord(log, run_dir if dist.is_main else None)))
            if own is None:  # `pipe` watches its ranks itself
                stack.enter_context(watched(run_dir, dist, launch.timeouts))
            if over_network:  # `pipe` gave ranks of one machine the same
                require_same_recipe(settings, spec.recipe["stages"], steps, ctx)
            runner = Runner(steps, ctx, journal, dry_run=settings.dry_run)
            stack.callback(runner.close)
            runner.run(spec.todo, spec.restore)
            stack.close()  # here, so that its errors are reported as well
        except Interrupted:
            raise
        except BaseException as error:
            _record(error, run_dir, ctx.slot if ctx else "")
            raise


def _require_possible(launch: Launch, run_dir: Path) -> None:
    """Raise RecipeError where this machine cannot run the ranks that were started on it."""
    wrong = impossible_here(launch, environment.started())
    if wrong is not None:
        place, (key, message, hint) = Location(file=str(run_dir / rundir.RECIPE)), wrong
        problem = Problem(message=message, key=f"launch.{key}", hint=hint, location=place)
        raise RecipeError([problem])


def _record(error: BaseException, run_dir: Path, slot: str) -> None:
    """Record the failure, and give the clean-up a deadline: then this process ends wherever it
    is."""
    rank, cause = environment.worker_rank(), error
    try:
        if isinstance(error, FileNotFoundError):  # of a run that is gone says only that
            rundir.require_kept(run_dir)
    except RunFailed as gone:
        cause = gone
    failures.record(run_dir, rank, slot, cause)
    logging.getLogger("pipe").debug("failed", exc_info=error)
    with contextlib.suppress(StageError):  # the folder may be gone
        file = open_log(run_dir, rank)
        faulthandler.dump_traceback_later(CLEANUP_SECONDS, exit=True, file=file)


STOP_SECONDS = 20.0
"""Seconds that a rank which was asked to stop waits for others: one that has died never comes."""


@contextlib.contextmanager
def watched(run_dir: Path, dist: DistContext, timeouts: Timeouts) -> Iterator[None]:
    """End this process with exit code 1 and its stacks in its log if the body shows no sign of life
    for longer than `timeouts` say, or was asked to stop and waits for ranks that do not come."""

    def watch(over: threading.Event) -> None:
        watchdog, stopping = Watchdog([dist.heartbeat], [os.getpid()], timeouts), 0.0
        while not over.wait(LOOK_SECONDS):
            waits = dist.stop.asked and dist.heartbeat.read().waits
            stopping = stopping + LOOK_SECONDS if waits else 0.0
            problems = [stall.describe() for stall in watchdog.stalled()]
            if stopping > STOP_SECONDS:
                problems = ["was asked to stop, and the others do not come"]
            for problem in problems:
                with contextlib.suppress(Exception):  # it may wait for a disk that does not answer
                    failures.record(run_dir, dist.rank, "", StageError(f"this rank {problem}"))
                    with open_log(run_dir, dist.rank) as log:
                        faulthandler.dump_traceback(log)
                os._exit(1)

    with in_thread(watch, "pipe-watch"):
        yield


if __name__ == "__main__":
    code = main(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the terminal may be closed
            stream.flush()
    # Library threads still hold C++ state here, and tearing it down can abort a finished run.
    os._exit(code)

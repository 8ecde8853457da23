"""Run a plan's ranks on this machine, and start them again after failures."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import click

from pipeline.chain.plan import Plan
from pipeline.distributed.environment import FINISHED, STOPPED, rank_environment
from pipeline.distributed.heartbeat import Phase, Watchdog
from pipeline.distributed.settings import Attempts, Launch
from pipeline.distributed.signals import ENDING, Interrupted, at_second_interrupt
from pipeline.errors import RunFailed, in_words
from pipeline.execution import failures, rundir
from pipeline.execution.failures import Exit
from pipeline.execution.journal import Journal
from pipeline.execution.rank_logging import ACTIVITY_FILE
from pipeline.execution.run_spec import RunSpec
from pipeline.execution.rundir import saved_step
from pipeline.hardware.host import cores_each
from pipeline.launch.ranks import LocalRanks, recorder_environment, report_stall
from pipeline.utils.files import memory_file
from pipeline.utils.packages import gc_as_usual
from pipeline.utils.processes import kill_descendants
from pipeline.utils.terminal import shown
from pipeline.view.screen import Screen

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables of the allocator: the name that all devices share, and the older one."""
POLL_SECONDS = 0.05
Check = Callable[[Interrupted | None], None]


def run_with_restarts(plan: Plan, spec: RunSpec, screen: Screen) -> None:
    """Run every rank to its end, started again after failures as `launch.restarts` says.

    Raises RunFailed with the first failing rank's error, and Interrupted once a signal has stopped
    the ranks. No rank outlives this call.
    """
    run_dir = Path(spec.run_dir)
    settings, attempts = plan.recipe.launch, Attempts(plan.recipe.launch.restarts)
    set_threads(settings, plan.per_node)
    while True:
        common = for_gpus(run_dir) if plan.view.device == "cuda" else {}
        ranks = LocalRanks(
            [common | rank_environment(n, plan.per_node) for n in range(plan.per_node)]
        )
        try:
            with kill_descendants(screen.refresh), ranks:
                run_ranks(ranks, settings, spec.left(plan), screen)
                return
        except RunFailed as error:
            rundir.require_kept(run_dir)
            wait = attempts.wait_after(error, progressed=ranks.landmarks() > 0)
            if wait is None or error.stopping:
                raise
            restarted(run_dir, plan, str(error), attempts.number, wait)
            time.sleep(wait)


def set_threads(settings: Launch, ranks_here: int) -> None:
    """Share the cores among the ranks unless the recipe or the environment has decided."""
    if settings.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(cores_each(ranks_here))


def for_gpus(run_dir: Path) -> dict[str, str]:
    """Variables for ranks on GPUs; what the user has set stays.

    They reserve memory in segments that grow: gathered units and activations differ in size, and
    would leave gaps between segments of fixed sizes. No rank shares its GPU's memory with another
    process, where such segments can fail."""
    found = recorder_environment(run_dir)
    if not any(name in os.environ for name in ALLOCATOR):
        found[ALLOCATOR[0]] = "expandable_segments:True"
    return found


def restarted(run_dir: Path, plan: Plan, problem: str, number: int, wait: float) -> None:
    """Record and show a failure after which the run is started again in `wait` seconds, as number
    `number` in a row."""
    journal = Journal(run_dir / rundir.JOURNAL)
    first = failures.without_continuation(problem, run_dir)
    journal.write("run failed", problem=shown(first), restarting=True)
    click.echo(f"{first}\n  starting again in {wait:g} s (restart {number})", err=True)
    failures.clear_reports(run_dir)
    (run_dir / ACTIVITY_FILE).unlink(missing_ok=True)  # a rank may have been killed at work
    # before the wait, which readers show as a run under way, not as a failed one
    journal.write("run started", procs=plan.view.procs, device=plan.view.device, restart=number)


def run_ranks(ranks: LocalRanks, settings: Launch, spec: RunSpec, screen: Screen) -> None:
    """Run the ranks to their end. They meet in a file in memory, which no one else can open and
    which ends with them."""
    store = memory_file("store")
    try:
        ranks.start(spec, store, screen.output)
    except OSError as error:
        reason = in_words(error)
        raise RunFailed(f"the processes could not be started: {reason}") from error
    finally:
        os.close(store)
    supervise(ranks, settings, Path(spec.run_dir), lambda interrupted: screen.refresh())


def supervise(ranks: LocalRanks, settings: Launch, run_dir: Path, check: Check) -> None:
    """Watch started ranks until all have finished. Raises RunFailed when one fails or stalls; a
    signal has all of them save and end, and is raised again when they have. `check` is called now
    and then, with what has stopped them if something has, and what it raises ends them."""
    gc_as_usual()  # this may take weeks
    pids = [process.pid for process in ranks.processes]
    watch = Watchdog(ranks.heartbeats, pids, settings.timeouts)
    stop: Interrupted | None = None
    try:
        while True:
            try:
                found = judged(ranks.ends(), len(pids), stopping=stop is not None)
                if found is None:
                    break
                if isinstance(found, Interrupted):
                    raise found
                stalls = [] if found else watch.stalled()
                if found or stalls:
                    slot = Journal(run_dir / rundir.JOURNAL).state().slot
                    if stalls:
                        raise report_stall(run_dir, slot, ranks, stalls)
                    raise ranks.end_and_explain(run_dir, found, slot)
                check(stop)
                time.sleep(POLL_SECONDS)
            except Interrupted as interrupted:
                stop = interrupted
                _announce(stop, ranks, run_dir)
                ranks.send(stop.number)
    except RunFailed as error:
        error.stopping = stop is not None
        raise
    if stop is not None:
        ranks.stop()
        if [end.code for end in ranks.ends()] != [FINISHED] * len(pids):
            raise stop


def judged(exits: list[Exit], ranks: int, *, stopping: bool) -> list[Exit] | Interrupted | None:
    """Judge the exits so far of this many ranks: the failures, maybe none yet; a signal that the
    other ranks have not got; None when there is nothing more to wait for."""
    bad = [end for end in exits if end.code != FINISHED]
    by_signal = [end for end in bad if -end.code in ENDING]
    failed = [end for end in bad if end.code != STOPPED and end not in by_signal]
    if bad and not failed and not stopping:
        # a rank was signalled, not we: the others must hear of it
        return Interrupted(next((-end.code for end in by_signal), None))
    failures_now = failed if stopping else bad
    # in a stop, one with nothing to save has ended at once, and the others would wait for it
    over = (len(exits) == ranks and not failures_now) or (stopping and by_signal)
    return None if over else failures_now


def _announce(interrupted: Interrupted, ranks: LocalRanks, run_dir: Path) -> None:
    """Print what a signal to this process leads to while ranks train, as they save first, and have
    a second Ctrl-C print how to continue."""
    at_second_interrupt(f"stopped by a second SIGINT\n{failures.continuation(run_dir)}\n")
    phases = {rank.read().phase for rank in ranks.heartbeats}
    if phases == {Phase.LOAD} or not interrupted.cause or ranks.ends():
        return  # also where another process got it, which has said so
    how = ""
    if interrupted.number == signal.SIGINT:
        step = None
        with contextlib.suppress(OSError):  # the folder may be gone
            step = saved_step(run_dir / rundir.METRICS)
        since = "the newest checkpoint" if step is None else f"step {step}"
        how = f"; again: stop now and lose the steps since {since}"
    with contextlib.suppress(OSError):  # a closed terminal
        click.echo(f"{interrupted.cause}: saving after this step, then stopping{how}", err=True)

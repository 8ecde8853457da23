"""Start the ranks of a run on this machine and wait for them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.distributed.environment import FINISHED, STORE, place
from pipeline.errors import RunFailed, in_words
from pipeline.hardware.host import cores_each
from pipeline.plan.plan import Plan
from pipeline.run import failures, rundir
from pipeline.run.failures import Exit
from pipeline.run.journal import Journal
from pipeline.utils.files import anonymous_file
from pipeline.utils.process_tree import kill_sessions, none_left, own_module

LOOK_SECONDS = 0.05
SHUTDOWN_SECONDS = 10
"""Seconds that ranks get to end when the run is stopped, before they are killed."""


def launch(plan: Plan, run_dir: Path, accept: Sequence[str] = ()) -> None:
    """Run every rank to its end. Raises RunFailed with the first failing rank's error.

    `accept` names changes that are intended. No rank outlives this call: the rest are
    stopped when one fails, and ranks die with this process.
    """
    _set_threads(plan)
    if plan.view.procs == 1:
        _one(run_dir, accept)
    else:
        _many(plan.view.procs, run_dir, accept)


def _set_threads(plan: Plan) -> None:
    """Share the cores among the ranks unless the recipe or the environment has decided."""
    threads = plan.recipe.launch.threads
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(cores_each(plan.view.procs))


def _one(run_dir: Path, accept: Sequence[str]) -> None:
    from pipeline.run.worker import run_rank

    try:
        run_rank(run_dir, accept=accept)
    except (Exception, SystemExit) as error:
        if failures.first_rank(run_dir) is None:  # it could not be written down
            raise RunFailed(failures.describe(error)) from error
        raise failures.first(run_dir, []) from None


def _many(procs: int, run_dir: Path, accept: Sequence[str]) -> None:
    command = own_module("pipeline.run.worker", str(run_dir), str(os.getpid()))
    ranks: list[subprocess.Popen[bytes]] = []
    ends: list[Exit] = []
    with none_left(), _spare_failures() as spare:
        try:
            ranks += _started([*command, *accept], procs, spare)
            ends += _first_ends(ranks)
        except OSError as error:
            reason = in_words(error)
            raise RunFailed(f"the processes could not be started: {reason}") from error
        finally:
            ends += _stopped(ranks)
        if ends:
            slot = Journal(run_dir / rundir.JOURNAL).running()
            raise failures.first(run_dir, ends, slot)


@contextlib.contextmanager
def _spare_failures() -> Iterator[int]:
    """A file in memory for reports of failures that a full disk does not take."""
    spare = anonymous_file("failures")
    os.environ[failures.SPARE] = f"/proc/self/fd/{spare}"
    try:
        yield spare
    finally:
        del os.environ[failures.SPARE]
        os.close(spare)


def _started(command: Sequence[str], procs: int, spare: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start the ranks. They meet in a file in memory, which nobody else can open and which ends
    with them."""
    store = anonymous_file("store")
    try:
        for rank in range(procs):
            own = {STORE: f"/proc/self/fd/{store}", **place(rank, procs)}
            yield subprocess.Popen(
                command, env=os.environ | own, pass_fds=[store, spare], stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
    finally:
        os.close(store)


def _first_ends(ranks: Sequence[subprocess.Popen[bytes]]) -> list[Exit]:
    """Wait for all to finish, or for the first that end otherwise, which are returned."""
    while True:
        codes = {rank: process.poll() for rank, process in enumerate(ranks)}
        ends = [Exit(rank, code) for rank, code in codes.items() if code not in (None, FINISHED)]
        if ends or None not in codes.values():
            return ends
        time.sleep(LOOK_SECONDS)


def _stopped(ranks: Sequence[subprocess.Popen[bytes]]) -> list[Exit]:
    """End those that are left. Returns the ones that another signal than ours ended: a dying
    process can take longer to be gone than its peers take to notice."""
    for process in ranks:
        process.terminate()
    deadline = time.monotonic() + SHUTDOWN_SECONDS
    for process in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    codes = {rank: process.returncode or 0 for rank, process in enumerate(ranks)}
    kill_sessions(ranks)
    return [Exit(rank, code) for rank, code in codes.items() if 0 > code != -signal.SIGTERM]

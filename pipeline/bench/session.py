"""All runs of a benchmark, one after another."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from pipeline.bench.results import Row, RunMeasurement, measured, with_efficiency
from pipeline.bench.trials import BenchLength, Written
from pipeline.distributed.signals import Interrupted, interruptible
from pipeline.errors import PipeError, RecipeError, StageError, UsageError, system_errors_as
from pipeline.plan.plan import Plan, plan_file
from pipeline.plan.registry import Registry
from pipeline.planning.memory_plan import estimated
from pipeline.planning.planner import Topology
from pipeline.planning.strategy import RESUME, SAVE
from pipeline.run import failures, metrics, rundir
from pipeline.run.journal import Journal
from pipeline.utils.process_tree import none_left

STOP_SECONDS = 60.0
"""How long this process may take to end when it is stopped; the run gets half of it."""
TRIALS = "trials"
"""Folder of the runs' own folders in that of the benchmark."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the runs came to."""

    rows: Sequence[Row]
    """Of those that ended, with their efficiency."""
    stopped: signal.Signals | None
    """What kept the others from it."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What the runs of a benchmark have in common."""

    plan: Plan
    """Of the recipe itself."""
    length: BenchLength
    trials: Sequence[Written]
    folder: Path
    """Of the benchmark, with an empty one for its runs."""
    threads: int | None
    """Of every process; None where the launcher decides."""
    minutes: int
    """Longest time of a run."""
    keep: bool
    registry: Registry

    def run(self, save: Callable[[Sequence[Row]], None]) -> Outcome:
        """Measure each trial, and `save` the rows whenever there is one more; what goes on is told
        on standard error. A signal ends it early, and loses the run that it interrupts alone."""
        rows: list[Row] = []
        stopped = None
        try:
            with interruptible(force_after=STOP_SECONDS):
                for trial in self.trials:
                    rows = with_efficiency([*rows, self._measured(trial)])
                    save(rows)
        except Interrupted as interrupted:
            stopped = interrupted.number
        with contextlib.suppress(OSError):  # runs that failed, and those to keep, are in it
            (self.folder / TRIALS).rmdir()
        return Outcome(rows=rows, stopped=stopped)

    def missing(self, rows: Sequence[Row]) -> list[str]:
        """Labels of the trials that are not among the rows."""
        return [trial.row.label for trial in self.trials[len(rows) :]]

    def _measured(self, trial: Written) -> Row:
        click.echo(trial.row.label, err=True)
        row = measure(
            trial.row,
            trial.text,
            self.folder / TRIALS / f"{trial.row.strategy}-{trial.row.procs}",
            warmup=self.length.warmup,
            minutes=self.minutes,
            keep=self.keep,
            registry=self.registry,
        )
        speed = row.speed and f"{row.speed.median:,.0f} tokens/s"
        click.echo(f"  {speed or row.error}", err=True)
        return row


EXIT_SECONDS = 30
"""How long a run that is asked to end gets to end its ranks."""
AFTERWARDS = (SAVE, RESUME)
"""Phases that measured memory does not hold."""
RUN = "run"
WORDS = ("logs", failures.FOLDER)
"""Folders in that of a run that tell why it failed."""


def measure(
    row: Row,
    recipe: str,
    folder: Path,
    *,
    warmup: int,
    minutes: int,
    keep: bool,
    registry: Registry,
) -> Row:
    """The row with its numbers, or with its error; a run that takes longer than `minutes` is ended.
    `folder` is for all that it writes, and is removed, but for what tells why a run failed, unless
    `keep`."""
    done = row
    try:
        done = _done(row, recipe, folder, warmup=warmup, minutes=minutes, registry=registry)
    finally:
        if not keep:
            _clear(folder, words=bool(done.error))
    return done


def _done(
    row: Row, recipe: str, folder: Path, *, warmup: int, minutes: int, registry: Registry
) -> Row:
    file = folder / "trial.yaml"
    try:
        with system_errors_as(StageError):
            folder.mkdir(parents=True)
            file.write_text(recipe, "utf-8")
            plan = plan_file(file, registry=registry, here=True)
            return replace(row, measured=_run(plan, file, folder, warmup, minutes))
    except RecipeError as error:
        first = replace(error.problems[0], location=None)  # in a file that nobody wrote
        return replace(row, error=str(first))
    except PipeError as error:
        return replace(row, error=_first_line(str(error)))


def _clear(folder: Path, *, words: bool) -> None:
    """Remove what a run has written, or, to leave its words, what is large. What cannot be removed
    costs no row."""
    if not words:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in (folder / RUN).glob("*"):
        if path.is_dir() and path.name not in WORDS:
            shutil.rmtree(path, ignore_errors=True)


def _run(plan: Plan, file: Path, folder: Path, warmup: int, minutes: int) -> RunMeasurement:
    """Raises PipeError when the run fails."""
    run_dir = folder / RUN
    command = ["run", str(file), "--run-dir", str(run_dir)]
    began = time.time()
    with (folder / "output.txt").open("wb") as output:
        code = _call(command, output.fileno(), minutes * 60)
    if code is None:
        slot = Journal(run_dir / rundir.JOURNAL).running()
        where = f" in slot `{slot}`" if slot else ""
        raise StageError(f"ended after {minutes} min{where}", hint="--timeout gives it longer")
    if code:
        raise StageError(_reason(run_dir, folder / "output.txt", code))
    records = list(metrics.records(run_dir / rundir.METRICS))
    try:
        return measured(records, warmup=warmup, began=began, predicted=_predicted(plan))
    except ValueError as error:
        raise StageError(str(error)) from error


def _call(arguments: list[str], output: int, seconds: float) -> int | None:
    """The exit code of `pipe ARGUMENTS` in a session of its own, as it ends its own ranks; None if
    it had to be ended after so many seconds. Nothing that it started outlives this call."""
    # -P: what lies in the user's folder must not stand in for modules that it imports
    command = [
        sys.executable,
        "-P",
        "-m",
        "pipeline.commands.supervised",
        str(os.getpid()),
        *arguments,
    ]
    with none_left():
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    for end in (process.terminate, process.kill):
        end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_SECONDS)


def _predicted(plan: Plan) -> int | None:
    """Peak of device memory until the end of the steps, as it is measured; None where a stage does
    not tell."""
    procs = plan.view.procs
    topology = Topology(ranks=procs, local_ranks=procs, device=plan.view.device)
    try:
        peaks = estimated(plan, topology).device
    except (UsageError, StageError):
        return None
    of_steps = [peak.bytes for phase, peak in peaks.items() if phase not in AFTERWARDS]
    return max(of_steps, default=None)


def _reason(run_dir: Path, output: Path, code: int) -> str:
    """Why a run failed: what its journal says, or else the last line that it printed."""
    for event in reversed(list(Journal(run_dir / rundir.JOURNAL).events())):
        if event.get("problem"):
            return str(event["problem"])
    if code < 0:
        return f"the run {failures.manner(code)}"
    lines = output.read_text("utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else f"ended with exit code {code}"


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[0] if lines else "failed without a word"

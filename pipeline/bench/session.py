"""Run the trials of a benchmark one after another, each in separate processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from pipeline.bench.results import Row, RunMeasurement, measured, with_efficiency
from pipeline.bench.trials import BenchLength, TrialRecipe
from pipeline.chain.plan import Plan, plan_file
from pipeline.chain.registry import Registry
from pipeline.contracts import metrics
from pipeline.distributed.signals import Interrupted, interruptible
from pipeline.errors import PipeError, RecipeError, StageError, UsageError, system_errors_as
from pipeline.execution import failures, rundir
from pipeline.execution.journal import Journal
from pipeline.planning.forecast import RESUME, SAVE
from pipeline.planning.hardware import HardwareOptions, Margins
from pipeline.planning.memory_plan import estimate_plan
from pipeline.utils.processes import kill_descendants, module_command

STOP_SECONDS = 60.0
"""Time limit of this process when it is stopped; the run gets half of it."""
EXIT_SECONDS = 30
"""Time limit of a run that is asked to end."""
TRIALS, RUN = "trials", "run"
"""Folders: of the trials in the benchmark's, and of the run in a trial's."""
REASONS = ("logs", failures.FOLDER)
"""Folders that show why a run failed."""
AFTERWARDS = (SAVE, RESUME)
"""Phases after the measured peak."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """The trials of a recipe, and their common settings."""

    plan: Plan
    """Plan of the recipe itself."""
    length: BenchLength
    trials: Sequence[TrialRecipe]
    folder: Path
    """Folder of the benchmark, with an empty one for its runs."""
    threads: int | None
    """CPU threads of every process; None if the launcher decides."""
    minutes: int
    """Time limit of a run."""
    keep: bool
    """Whether the folders of all runs are kept."""
    registry: Registry

    def run(self, save: Callable[[Sequence[Row]], None]) -> tuple[list[Row], signal.Signals | None]:
        """Measure each trial, calling `save` with all rows after each. Returns the rows with their
        efficiency, and the signal that ended the benchmark before the remaining ones."""
        rows: list[Row] = []
        stopped = None
        try:
            with interruptible(force_after=STOP_SECONDS):
                for trial in self.trials:
                    click.echo(trial.row.label, err=True)
                    row = trial.row
                    folder = self.folder / TRIALS / f"{row.strategy}-{row.procs}"
                    try:
                        row = self._tried(trial, folder)
                    finally:
                        if not self.keep:
                            _clear(folder, failed=bool(row.error))
                    speed = row.speed and f"{row.speed.median:,.0f} tokens/s"
                    click.echo(f"  {speed or row.error}", err=True)
                    rows = with_efficiency([*rows, row])
                    save(rows)
        except Interrupted as interrupted:
            stopped = interrupted.number
        with contextlib.suppress(OSError):  # it may hold runs that failed or are kept
            (self.folder / TRIALS).rmdir()
        return rows, stopped

    def missing(self, rows: Sequence[Row]) -> list[str]:
        """Labels of the trials that are not among the rows."""
        return [trial.row.label for trial in self.trials[len(rows) :]]

    def _tried(self, trial: TrialRecipe, folder: Path) -> Row:
        """The trial's row with its numbers or its error."""
        file = folder / "trial.yaml"
        try:
            with system_errors_as(StageError):
                folder.mkdir(parents=True)
                file.write_text(trial.text, "utf-8")
                plan = plan_file(file, registry=self.registry, for_this_machine=True)
                return replace(trial.row, measured=self._run(plan, file, folder))
        except RecipeError as error:
            first = replace(error.problems[0], location=None)  # in a file that nobody wrote
            return replace(trial.row, error=str(first))
        except PipeError as error:
            lines = str(error).strip().splitlines() or ["failed without a message"]
            return replace(trial.row, error=lines[0])

    def _run(self, plan: Plan, file: Path, folder: Path) -> RunMeasurement:
        """The numbers of a run. Raises PipeError if it fails."""
        run_dir = folder / RUN
        command = ["run", str(file), "--run-dir", str(run_dir)]
        began = time.time()
        with (folder / "output.txt").open("wb") as output:
            code = _call(command, output.fileno(), self.minutes * 60)
        if code is None:
            slot = Journal(run_dir / rundir.JOURNAL).state().slot
            where = f" in slot `{slot}`" if slot else ""
            raise StageError(f"ended after {self.minutes} min{where}", hint="--timeout allows more")
        if code:
            raise StageError(_reason(run_dir, folder / "output.txt", code))
        records = list(metrics.records(run_dir / rundir.METRICS))
        predicted = _predicted(plan)
        return measured(records, warmup=self.length.warmup, began=began, predicted=predicted)


def _clear(folder: Path, *, failed: bool) -> None:
    """Remove the folder of a run; if it failed, only large folders that show no reason."""
    if not failed:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in (folder / RUN).glob("*"):
        if path.is_dir() and path.name not in REASONS:
            shutil.rmtree(path, ignore_errors=True)


def _call(arguments: list[str], output: int, seconds: float) -> int | None:
    """Exit code of `pipe ARGUMENTS` in a separate session; None if it was ended after `seconds`. No
    process that it started outlives this call."""
    command = module_command("pipeline.commands.supervised", str(os.getpid()))
    with kill_descendants():
        process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            for end in (process.terminate, process.kill):
                end()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(EXIT_SECONDS)


def _predicted(plan: Plan) -> int | None:
    """Estimated peak of device memory up to the last step; None if a stage has no estimate."""
    on_cpu = plan.view.device == "cpu"
    machine = HardwareOptions(gpus=None if on_cpu else plan.view.procs)
    try:
        peaks = estimate_plan(plan, machine, Margins()).estimate.device
    except (UsageError, StageError):
        return None
    of_steps = [peak.bytes for phase, peak in peaks.items() if phase not in AFTERWARDS]
    return max(of_steps, default=None)


def _reason(run_dir: Path, output: Path, code: int) -> str:
    """Reason of a run's failure: the problem in its journal, or else the last line it printed."""
    for event in reversed(list(Journal(run_dir / rundir.JOURNAL).events())):
        if event.get("problem"):
            return str(event["problem"])
    if code < 0:
        return f"the run {failures.manner(code)}"
    lines = output.read_text("utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else f"ended with exit code {code}"

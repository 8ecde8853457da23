"""Run the trials of a benchmark one after another, each in separate processes, and measure them."""

from __future__ import annotations

import contextlib
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import click

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
from pipeline.utils.processes import ended_with_this, kill_descendants
from pipeline.utils.text import plural

STOP_SECONDS = 60.0
"""Time limit of this process when it is stopped."""
EXIT_SECONDS = 30
"""Seconds until all processes of a run that is given up have ended."""
TRIALS, RUN = "trials", "run"
"""Folders: of the trials in the benchmark's, and of the run in a trial's."""
REASONS = ("logs", failures.FOLDER)
"""Folders that show why a run failed."""
AFTERWARDS = (SAVE, RESUME)
"""Phases after the measured peak."""
SAVED = ("checkpoint_seconds", "checkpoint_stall_seconds")
SPREAD_STEPS = 3
"""Fewest steps whose extremes are a spread."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Median and extremes of a number over the measured steps."""

    median: float
    low: float
    high: float
    steps: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Speed:
        """The speed of at least one value."""
        found = sorted(values)
        return cls(median=statistics.median(found), low=found[0], high=found[-1], steps=len(found))

    @property
    def spread(self) -> float | None:
        """Half of the distance between the extremes, relative to the median; None for few steps."""
        return (self.high - self.low) / 2 / self.median if self.steps >= SPREAD_STEPS else None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peak of the fullest rank in bytes, measured, and predicted for the plan's tensors."""

    kind: Literal["device", "host"]
    """`device`: tensors on the rank's GPU. `host`: resident memory beyond that before the model."""
    measured: int | None = None
    predicted: int | None = None

    @property
    def ratio(self) -> float | None:
        """Measured to predicted; None for resident memory, which is not only of tensors."""
        if self.kind == "host" or not self.measured or not self.predicted:
            return None
        return self.measured / self.predicted


@dataclass(frozen=True, kw_only=True)
class RunMeasurement:
    """The numbers of a successful run. Tokens and samples are over all ranks."""

    tokens_per_second: Speed
    """Tokens without padding."""
    step_seconds: Speed
    steps_left_out: int
    """Steps after warm-up whose update loss scaling skipped."""
    tokens_per_step: float
    samples_per_step: int
    data_wait_share: float
    communication_share: float | None
    first_step_seconds: float
    """Time from the start of the command to the end of the first step."""
    checkpoint_seconds: float | None
    """Time from the beginning of the save to the last byte on disk."""
    checkpoint_stall_seconds: float | None
    memory: Memory


@dataclass(frozen=True, kw_only=True)
class Row:
    """One strategy on a number of processes, with its numbers or its error in one line."""

    strategy: str
    use: str
    procs: int
    measured: RunMeasurement | None = None
    error: str = ""
    efficiency: float | None = None
    """T_N / (N * T_1), or with `efficiency_base` instead of 1."""
    efficiency_base: int | None = None
    """Smallest number of processes of the strategy's runs."""

    @property
    def label(self) -> str:
        """`fsdp on 2 processes`."""
        return f"{self.strategy} on {plural(self.procs, 'process')}"

    @property
    def speed(self) -> Speed | None:
        return None if self.measured is None else self.measured.tokens_per_second


def measured(
    records: Sequence[Mapping[str, Any]], *, warmup: int, began: float, predicted: int | None
) -> RunMeasurement:
    """The numbers in a run's `metrics.jsonl`, without the first `warmup` steps, profiled steps and
    steps without an update; `began` is the start of its command (epoch seconds). Raises StageError
    if no step is left."""
    steps = [record for record in records if "loss" in record]
    plain = [record for record in steps if not record.get("profiled")]
    counted = [record for record in plain[warmup:] if record.get("applied", True)]
    if not plain[warmup:]:
        raise StageError("no steps were recorded after warm-up")
    if not counted:
        raise StageError("no step after warm-up updated the model", hint="more --warmup may help")
    seconds = [record["step_seconds"] for record in counted]

    def in_steps(name: str) -> list[float]:
        return [record[name] * record["step_seconds"] for record in counted]

    profiled = (one for one in steps if one.get("profiled") and one.get("applied", True))
    saved = {name: one[name] for one in records for name in SAVED if name in one}  # the newest
    kind: Literal["device", "host"] = "device" if "peak_memory_bytes" in plain[-1] else "host"
    peak = plain[-1].get("peak_memory_bytes" if kind == "device" else "peak_host_memory_bytes")
    return RunMeasurement(
        tokens_per_second=Speed.of(record["tokens_per_second"] for record in counted),
        step_seconds=Speed.of(seconds),
        steps_left_out=len(plain[warmup:]) - len(counted),
        tokens_per_step=statistics.median(in_steps("tokens_per_second")),
        samples_per_step=round(statistics.median(map(round, in_steps("samples_per_second")))),
        data_wait_share=sum(in_steps("data_wait_share")) / sum(seconds),
        communication_share=next(profiled, {}).get("communication_share"),
        first_step_seconds=steps[0]["time"] - began,
        checkpoint_seconds=saved.get("checkpoint_seconds"),
        checkpoint_stall_seconds=saved.get("checkpoint_stall_seconds"),
        memory=Memory(kind=kind, measured=peak, predicted=predicted),
    )


def with_efficiency(rows: Sequence[Row]) -> list[Row]:
    """The rows with their scaling efficiency, relative to the strategy's smallest run."""
    bases: dict[str, tuple[int, float]] = {}
    found = []
    for row in sorted(rows, key=lambda row: row.procs):
        if row.speed:
            bases.setdefault(row.strategy, (row.procs, row.speed.median / row.procs))
    for row in rows:
        if row.speed:
            base, each = bases[row.strategy]
            share = row.speed.median / row.procs / each
            row = replace(row, efficiency=share, efficiency_base=base)
        found.append(row)
    return found


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
                for trial, row in zip(self.trials, self.rows, strict=True):
                    click.echo(row.label, err=True)
                    folder = self.folder / TRIALS / f"{row.strategy}-{row.procs}"
                    try:
                        row = self._tried(trial.text, row, folder)
                    finally:
                        found = [folder]
                        if row.error:  # only large folders that show no reason
                            inside = (folder / RUN).glob("*")
                            found = [o for o in inside if o.is_dir() and o.name not in REASONS]
                        for path in found if not self.keep else ():
                            shutil.rmtree(path, ignore_errors=True)
                    speed = row.speed and f"{row.speed.median:,.0f} tokens/s"
                    click.echo(f"  {speed or row.error}", err=True)
                    rows = with_efficiency([*rows, row])
                    save(rows)
        except Interrupted as interrupted:
            stopped = interrupted.number
        with contextlib.suppress(OSError):  # it may hold runs that failed or are kept
            (self.folder / TRIALS).rmdir()
        return rows, stopped

    @property
    def rows(self) -> list[Row]:
        """The rows of all trials, without numbers."""
        return [Row(strategy=one.strategy, use=one.use, procs=one.procs) for one in self.trials]

    def _tried(self, text: str, row: Row, folder: Path) -> Row:
        """The row with its numbers or its error."""
        file = folder / "trial.yaml"
        try:
            with system_errors_as(StageError):
                folder.mkdir(parents=True)
                file.write_text(text, "utf-8")
                plan = plan_file(file, registry=self.registry, for_this_machine=True)
                return replace(row, measured=self._run(plan, file, folder))
        except RecipeError as error:
            first = replace(error.problems[0], location=None)  # in a file that no one wrote
            return replace(row, error=str(first))
        except PipeError as error:
            lines = str(error).strip().splitlines() or ["failed without a message"]
            return replace(row, error=lines[0])

    def _run(self, plan: Plan, file: Path, folder: Path) -> RunMeasurement:
        """The numbers of a run. Raises PipeError if it fails."""
        run_dir, output, began = folder / RUN, folder / "output.txt", time.time()
        command = ["run", str(file), "--run-dir", str(run_dir)]
        with output.open("wb") as written:
            code = _call(command, written.fileno(), self.minutes * 60)
        if code is None:
            slot = Journal(run_dir / rundir.JOURNAL).state().slot
            where = f" in slot `{slot}`" if slot else ""
            raise StageError(f"ended after {self.minutes} min{where}", hint="--timeout allows more")
        if code:
            raise StageError(_reason(run_dir, output, code))
        records = list(metrics.records(run_dir / rundir.METRICS))
        predicted = _predicted(plan)
        return measured(records, warmup=self.length.warmup, began=began, predicted=predicted)


def _call(arguments: list[str], output: int, seconds: float) -> int | None:
    """Exit code of `pipe ARGUMENTS` in a separate session; None if it was ended after `seconds`. No
    process that it started outlives this call."""
    command = ended_with_this([sys.executable, "-P", "-m", "pipetrain", *arguments])
    with kill_descendants():
        process = subprocess.Popen(
            command,
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
    for event in reversed(Journal(run_dir / rundir.JOURNAL).events()):
        if event.get("problem"):
            return str(event["problem"])
    if code < 0:
        return f"the run {failures.manner(code)}"
    lines = output.read_text("utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else f"ended with exit code {code}"

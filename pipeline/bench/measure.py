"""One run of a benchmark: in a process of its own, through the launcher of `pipe run`."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from pipeline import failure, metrics, rundir
from pipeline.bench.results import Measured, Row, measured
from pipeline.errors import PipeError, RecipeError, StageError, UsageError, system_errors_as
from pipeline.forecast.chain import forecast
from pipeline.forecast.site import Site
from pipeline.journal import Journal
from pipeline.plan import Plan, plan_file
from pipeline.registry import Registry

STOP_SECONDS = 30
"""How long a run gets to end its ranks when the benchmark is stopped."""


def measure(
    row: Row, recipe: str, folder: Path, *, warmup: int, keep: bool, registry: Registry
) -> Row:
    """The row with its numbers, or with its error. `folder` is for the run and what it prints; it
    goes away when all went well, unless `keep`."""
    file = folder / "trial.yaml"
    try:
        with system_errors_as(StageError):
            folder.mkdir(parents=True)
            file.write_text(recipe, "utf-8")
        plan = plan_file(file, registry=registry, here=True)
        done = replace(row, measured=_run(plan, file, folder, warmup))
    except RecipeError as error:
        first = replace(error.problems[0], location=None)  # in a file that nobody wrote
        return replace(row, error=str(first))
    except PipeError as error:
        return replace(row, error=_first_line(str(error)))
    if not keep:
        shutil.rmtree(folder)
    return done


def _run(plan: Plan, file: Path, folder: Path, warmup: int) -> Measured:
    """Raises PipeError when the run fails."""
    run_dir = folder / "run"
    command = ["run", str(file), "--run-dir", str(run_dir)]
    began = time.time()
    with (folder / "output.txt").open("wb") as output:
        code = _call(command, output.fileno())
    if code:
        raise StageError(_reason(run_dir, folder / "output.txt", code))
    records = list(metrics.records(run_dir / rundir.METRICS))
    try:
        return measured(records, warmup=warmup, began=began, predicted=_predicted(plan))
    except ValueError as error:
        raise StageError(str(error)) from error


def _call(arguments: list[str], output: int) -> int:
    """The exit code of `pipe ARGUMENTS` in a session of its own, as it ends its own ranks."""
    command = [sys.executable, "-m", "pipeline.bench.child", str(os.getpid()), *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        process.kill()
        raise


def _predicted(plan: Plan) -> int | None:
    """Peak of device memory; None where a stage does not tell."""
    procs = plan.view.procs
    site = Site(ranks=procs, local_ranks=procs, device=plan.view.device)
    try:
        return forecast(plan, site).peak
    except (UsageError, StageError):
        return None


def _reason(run_dir: Path, output: Path, code: int) -> str:
    """Why a run failed: what its journal says, or else the last line that it printed."""
    for event in reversed(list(Journal(run_dir / rundir.JOURNAL).events())):
        if event.get("problem"):
            return str(event["problem"])
    if code < 0:
        return f"the run {failure.manner(code)}"
    lines = output.read_text("utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else f"ended with exit code {code}"


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[0] if lines else "failed without a word"

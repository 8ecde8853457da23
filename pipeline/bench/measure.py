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
from pipeline.journal import Journal
from pipeline.launch.children import none_left
from pipeline.plan import Plan, plan_file
from pipeline.planning.memory_plan import estimated
from pipeline.planning.planner import Topology
from pipeline.planning.strategy import RESUME, SAVE
from pipeline.registry import Registry

EXIT_SECONDS = 30
"""How long a run that is asked to end gets to end its ranks."""
AFTERWARDS = (SAVE, RESUME)
"""Phases that measured memory does not hold."""
RUN = "run"
WORDS = ("logs", failure.FOLDER)
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


def _run(plan: Plan, file: Path, folder: Path, warmup: int, minutes: int) -> Measured:
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
    command = [sys.executable, "-P", "-m", "pipeline.bench.child", str(os.getpid()), *arguments]
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
        return f"the run {failure.manner(code)}"
    lines = output.read_text("utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else f"ended with exit code {code}"


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[0] if lines else "failed without a word"

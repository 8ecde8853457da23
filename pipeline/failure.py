"""How a rank's failure reaches the person: a file per failed rank, and the choice of the first."""

from __future__ import annotations

import json
import shutil
import signal
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import PipeError, RunFailed

FOLDER = "failures"


def clear(run_dir: Path) -> None:
    """Forget the failures of an earlier start."""
    shutil.rmtree(run_dir / FOLDER, ignore_errors=True)


def record(run_dir: Path, rank: int, slot: str, error: BaseException) -> None:
    """Write what went wrong on this rank, with the time, for the launching process to read."""
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    trace = "".join(traceback.format_exception(error))
    facts = {
        "time": time.time(),
        "rank": rank,
        "slot": slot,
        "message": describe(error),
        "expected": isinstance(error, PipeError),
        "place": _place(error),
        "traceback": trace,
    }
    path = folder / f"rank-{rank:05d}.json"
    path.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")


def describe(error: BaseException) -> str:
    """The error in one paragraph; a PipeError's message stands for itself."""
    if isinstance(error, PipeError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


def first(run_dir: Path, exit_codes: Mapping[int, int]) -> RunFailed:
    """The error to show: of the rank that failed first.

    `exit_codes` are those of failed ranks; negative ones are signals. A rank that was killed comes
    before ranks that raised, because a lost peer is what makes the others raise; SIGTERM does not
    count, as it is how the launcher stops the rest.
    """
    for rank, code in sorted(exit_codes.items()):
        if code < 0 and code != -signal.SIGTERM:
            return RunFailed(_killed(run_dir, rank, -code))
    reports = [json.loads(path.read_text("utf-8")) for path in _files(run_dir)]
    if reports:
        return RunFailed(_raised(run_dir, min(reports, key=lambda report: report["time"])))
    codes = ", ".join(f"rank {rank}: {code}" for rank, code in sorted(exit_codes.items()))
    return RunFailed(f"a process ended without saying why (exit codes: {codes or 'none'})")


def _files(run_dir: Path) -> list[Path]:
    return sorted((run_dir / FOLDER).glob("rank-*.json"))


def _killed(run_dir: Path, rank: int, number: int) -> str:
    name = signal.Signals(number).name
    why = "; the system does this when memory runs out" if number == signal.SIGKILL else ""
    return (
        f"rank {rank} was killed by {name}{why}\n"
        f"  log: {run_dir}/logs/rank-{rank:05d}.log\n{_continue(run_dir)}"
    )


def _raised(run_dir: Path, report: Mapping[str, Any]) -> str:
    lines = [f"rank {report['rank']} failed in slot `{report['slot']}`: {report['message']}"]
    if not report["expected"]:
        path = run_dir / FOLDER / f"rank-{report['rank']:05d}.json"
        lines.append(f"  at {report['place']}\n  traceback: {path}")
    return "\n".join([*lines, _continue(run_dir)])


def _continue(run_dir: Path) -> str:
    return f"  continue with: pipe resume {run_dir}"

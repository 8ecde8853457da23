"""How a rank's failure reaches the person: two files per failed rank, and the choice of the first.

failures/rank-N.json is for the launching process, failures/rank-N.txt is the traceback.
"""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import PipeError, ResumeRefused, RunFailed

FOLDER = "failures"
MOST_LINES = 12
"""Of an error's message; libraries append whole native stacks to theirs."""
CONSEQUENCES = {signal.SIGTERM, signal.SIGABRT}
"""How ranks end because of another: stopped by the launcher, or aborted by a library that lost its
peer."""
SAME_TIME_SECONDS = 5
"""The launcher kills what does not end on request, later than this after the first failure."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How a rank's process ended: a negative code is a signal's number; `time` in seconds."""

    rank: int
    code: int
    time: float


def clear(run_dir: Path) -> None:
    """Forget the failures of an earlier start."""
    shutil.rmtree(run_dir / FOLDER, ignore_errors=True)


def record(run_dir: Path, rank: int, slot: str, error: BaseException) -> None:
    """Write what went wrong on this rank, with the time, for the launching process to read.

    What cannot be written, on a full disk say, goes to standard error.
    """
    facts = {
        "time": time.time(),
        "rank": rank,
        "slot": slot,
        "message": describe(error),
        "expected": isinstance(error, PipeError),
        "refused": isinstance(error, ResumeRefused),
        "place": _place(error),
    }
    trace = "".join(traceback.format_exception(error))
    try:
        (run_dir / FOLDER).mkdir(exist_ok=True)
        _traceback_file(run_dir, rank).write_text(trace, "utf-8")
        report = run_dir / FOLDER / f"rank-{rank:05d}.json"
        report.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
    except OSError:
        print(trace, file=sys.stderr)


def describe(error: BaseException) -> str:
    """The error in one paragraph; a PipeError's message stands for itself."""
    if isinstance(error, PipeError):
        return str(error)
    name = type(error).__name__
    lines = str(error).strip().splitlines()
    if len(lines) > MOST_LINES:
        lines = [*lines[:MOST_LINES], "..."]
    return f"{name}: " + "\n".join(lines) if lines else name


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


def first(run_dir: Path, exits: Sequence[Exit], slot: str | None = None) -> RunFailed:
    """The error to show: of the rank that failed first.

    `exits` are those of ranks that did not end well, `slot` the one that was running. A rank that
    died without a word comes before ranks that raised, because a lost peer makes others raise.
    """
    reports = _reports(run_dir)
    silent = _silent(exits, {report["rank"] for report in reports})
    causes = [end for end in silent if -end.code not in CONSEQUENCES]
    if causes:
        return RunFailed(_died(run_dir, causes[0], slot))
    if reports:
        return RunFailed(_raised(run_dir, reports[0]))
    if silent:
        return RunFailed(_died(run_dir, silent[0], slot))
    return RunFailed(f"the run failed without saying why\n{_continue(run_dir)}")


def first_rank(run_dir: Path) -> int | None:
    """The rank that raised first, as far as this machine's view of the folder tells."""
    return next((report["rank"] for report in _reports(run_dir)), None)


def refused(run_dir: Path) -> bool:
    """Whether a rank refused to go on under the recipe that it was given."""
    return any(report["refused"] for report in _reports(run_dir))


def _reports(run_dir: Path) -> list[dict[str, Any]]:
    """What ranks wrote, earliest first; what a rank did not finish writing does not count."""
    reports = []
    for path in (run_dir / FOLDER).glob("rank-*.json"):
        try:
            reports.append(json.loads(path.read_bytes()))
        except ValueError:
            continue
    return sorted(reports, key=lambda report: (report["time"], report["rank"]))


def _silent(exits: Sequence[Exit], reported: set[int]) -> list[Exit]:
    """Ends without a report, earliest first, less those that the launcher itself brought about."""
    earliest = min((end.time for end in exits), default=0.0)
    silent = [end for end in exits if end.rank not in reported]
    silent = [end for end in silent if end.time <= earliest + SAME_TIME_SECONDS]
    return sorted(silent, key=lambda end: (end.time, end.rank))


def _died(run_dir: Path, end: Exit, slot: str | None) -> str:
    where = f"in slot `{slot}`" if slot else "before the first slot"
    return (
        f"rank {end.rank} {manner(end.code)} {where}\n"
        f"  log: {run_dir}/logs/rank-{end.rank:05d}.log\n{_continue(run_dir)}"
    )


def manner(code: int) -> str:
    """How a process with this exit code ended, as a verb; a negative one is a signal's number."""
    if code >= 0:
        return f"ended by itself with exit code {code}"
    if -code == signal.SIGKILL:
        return "was killed by SIGKILL (the system does this when memory runs out)"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _raised(run_dir: Path, report: Mapping[str, Any]) -> str:
    where = f"in slot `{report['slot']}`" if report["slot"] else "before the first slot"
    lines = [f"rank {report['rank']} failed {where}: {report['message']}"]
    if not report["expected"]:
        lines.append(f"  at {report['place']}")
        lines.append(f"  traceback: {_traceback_file(run_dir, report['rank'])}")
    return "\n".join([*lines, _continue(run_dir)])


def _traceback_file(run_dir: Path, rank: int) -> Path:
    return run_dir / FOLDER / f"rank-{rank:05d}.txt"


def _continue(run_dir: Path) -> str:
    return f"  continue with: pipe resume {shlex.quote(str(run_dir))}"

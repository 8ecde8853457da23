"""Reports of failed ranks, and the choice of the one that is shown.

failures/rank-N.json is for the launching process, failures/rank-N.txt is the traceback. Where a GPU
had no memory left, rank-N.memory.json.gz and rank-N.memory.txt say what was allocated."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.distributed.environment import shared
from pipeline.errors import (
    BadRows,
    DataError,
    EngineMismatch,
    PipeError,
    RecipeError,
    Restart,
    ResumeRefused,
    RunFailed,
    UsageError,
    in_words,
    is_user_error,
)
from pipeline.utils.files import private_folder, read_all, remove_folder, replace_text
from pipeline.utils.foreign import parse_json, read_whole
from pipeline.utils.terminal import shown

FOLDER = "failures"
UNDONE = "undone"
"""File in it: the command that failed has left the run as it was."""
MISTAKES = (BadRows, DataError, EngineMismatch, RecipeError, ResumeRefused, UsageError)
"""Errors that come again unless a person changes the recipe or the data."""
MOST_LINES = 12
"""Lines of an error's message that are kept; libraries append whole native stacks to theirs."""


class Exit(NamedTuple):
    """Exit code of a rank's process that ended by itself; a negative code is a signal's number."""

    rank: int
    code: int


def clear(run_dir: Path) -> None:
    """Forget the failures of an earlier command."""
    remove_folder(run_dir / FOLDER)


def clear_reports(run_dir: Path) -> None:
    """Forget the reports of a start that is repeated; its tracebacks stay until the next failure,
    or the next command."""
    for path in (run_dir / FOLDER).glob("rank-*.json"):
        path.unlink(missing_ok=True)


def undo(run_dir: Path) -> None:
    """Note that the reports are of a command that left the run as it was."""
    (private_folder(run_dir / FOLDER) / UNDONE).touch()


def in_force(run_dir: Path) -> bool:
    """Whether a rank raised in the newest command, unless that left the run as it was."""
    return first_rank(run_dir) is not None and not (run_dir / FOLDER / UNDONE).exists()


def record(run_dir: Path, rank: int, slot: str, error: BaseException) -> None:
    """Write this rank's error, with the time, for the launching process to read. If the run's disk
    is full, the report goes to the launcher's file and the traceback to standard error."""
    facts = json.dumps(
        {
            "time": time.time(),
            "rank": rank,
            "slot": slot,
            "message": shown(describe(error)),
            "expected": is_user_error(error),
            "refused": isinstance(error, ResumeRefused),
            "mistake": isinstance(error, MISTAKES),
            "memory": _memory(error),
            "snapshot": _snapshot(run_dir, rank) if _memory(error) == "device" else None,
            "restart": _restart(error),
            "place": _place(error),
        }
    )
    trace = shown("".join(traceback.format_exception(error)))
    folder = run_dir / FOLDER
    try:
        private_folder(folder)
        replace_text(folder / f"rank-{rank:05d}.json", facts + "\n")
        replace_text(_traceback_file(run_dir, rank), trace)
    except OSError:
        own = shared()
        if own is not None:
            with Path(f"/proc/self/fd/{own.failures}").open("a", encoding="utf-8") as memory:
                memory.write(facts + "\n")
        if own is None or not is_user_error(error):
            print(describe(error) if is_user_error(error) else trace, file=sys.stderr)


def _restart(error: BaseException) -> Restart:
    """Return when another start may succeed. A failure that asks nothing of a person may have been
    an accident."""
    if isinstance(error, PipeError):
        return error.restart
    return "never" if is_user_error(error) else "after progress"


def _memory(error: BaseException) -> str:
    """Kind of memory that the error is about; empty if it is about something else."""
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported for this
        return "device"
    return "host" if isinstance(error, MemoryError) else ""


def _snapshot(run_dir: Path, rank: int) -> str | None:
    """Write what holds this rank's GPU's memory; the file's path, None where that cannot be. The
    traceback keeps alive what the failed step had."""
    with contextlib.suppress(Exception):  # the report of the error matters more
        import torch

        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            from pipeline.hardware import write_snapshot

            path = private_folder(run_dir / FOLDER) / f"rank-{rank:05d}.memory.json.gz"
            write_snapshot(path)
            return str(path)
    return None


def describe(error: BaseException) -> str:
    """The error in one paragraph; a PipeError's message stands for itself."""
    if is_user_error(error):
        return in_words(error)
    name = type(error).__name__
    lines = str(error).strip().splitlines()
    if len(lines) > MOST_LINES:
        lines = [*lines[:MOST_LINES], "..."]
    return f"{name}: " + "\n".join(lines) if lines else name


def _place(error: BaseException) -> str:
    from pipeline.chain.entry_points import line_in_plugin

    line = line_in_plugin(error)
    if line:
        return line
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


def first(
    run_dir: Path,
    exits: Sequence[Exit],
    slot: str | None = None,
    *,
    oom: bool = False,
    unwritten: Sequence[bytes] = (),
) -> RunFailed:
    """The error to show: of the rank that failed first.

    `exits` are of ranks that did not end well, earliest first, without what the launcher itself
    brought about; `slot` is the one that was running. `oom` says whether the system has killed a
    process here for lack of memory, `unwritten` has reports that the run's disk did not take. A
    rank that died without a word comes before ranks that raised, because a lost peer makes others
    raise, or has a library abort them."""
    reports = _reports(run_dir, unwritten)
    reported = {report["rank"] for report in reports}
    silent = [end for end in exits if end.rank not in reported]
    causes = [end for end in silent if end.code != -signal.SIGABRT]
    if causes:
        return _died(run_dir, causes[0], slot, oom)
    if reports:
        return _raised(run_dir, reports[0])
    if silent:
        return _died(run_dir, silent[0], slot, oom)
    return RunFailed(f"the run failed without saying why\n{continuation(run_dir)}")


def first_rank(run_dir: Path) -> int | None:
    """The rank that raised first, as far as this machine sees the folder."""
    return next((report["rank"] for report in _reports(run_dir)), None)


def refused(run_dir: Path) -> bool:
    """Whether a rank refused to continue under the recipe that it was given."""
    return any(report["refused"] for report in _reports(run_dir))


def _reports(run_dir: Path, unwritten: Sequence[bytes] = ()) -> list[dict[str, Any]]:
    """Reports of ranks, earliest first, without incomplete ones."""
    texts: list[str | bytes] = []
    for path in (run_dir / FOLDER).glob("rank-*.json"):
        with contextlib.suppress(OSError):
            texts.append(read_whole(path, within=run_dir))
    own = shared()
    texts += unwritten if own is None else read_all(own.failures).splitlines()
    reports = []
    for text in texts:
        with contextlib.suppress(ValueError):
            report = parse_json(text)
            # a folder that came from elsewhere can hold anything
            kinds: Mapping[str, Any] = {
                "time": (int, float), "rank": int, "slot": str, "message": str, "expected": bool,
                "refused": bool, "restart": str, "memory": str, "place": str,
            }  # fmt: skip
            if isinstance(report, dict) and all(
                isinstance(report.get(key), kind) for key, kind in kinds.items()
            ):
                reports.append(report)
    return sorted(reports, key=lambda report: (report["time"], report["rank"]))


def _died(run_dir: Path, end: Exit, slot: str | None, oom: bool) -> RunFailed:
    where = f"in slot `{slot}`" if slot else "before the first slot"
    killed = oom and -end.code == signal.SIGKILL
    how = "was killed by the system, which was out of memory," if killed else manner(end.code)
    text = (
        f"rank {end.rank} {how} {where}\n"
        f"  log: {run_dir}/logs/rank-{end.rank:05d}.log\n{continuation(run_dir)}"
    )
    return RunFailed(text, kind="died", restart="always", memory="host" if killed else "")


def manner(code: int) -> str:
    """Verb phrase for the end of a process with this exit code; a negative one is a signal's
    number."""
    if code >= 0:
        return f"ended by itself with exit code {code}"
    if -code == signal.SIGKILL:
        return "was killed by SIGKILL (the system does this when memory runs out)"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _raised(run_dir: Path, report: Mapping[str, Any]) -> RunFailed:
    where = f"in slot `{report['slot']}`" if report["slot"] else "before the first slot"
    lines = [f"rank {report['rank']} failed {where}: {report['message']}"]
    if not report["expected"]:
        lines.append(f"  at {report['place']}")
        lines.append(f"  traceback: {_traceback_file(run_dir, report['rank'])}")
    if report.get("snapshot"):
        lines.append(f"  what held the memory: {report['snapshot']}")
    lines.append(continuation(run_dir, mistake=bool(report.get("mistake"))))
    return RunFailed("\n".join(lines), restart=report["restart"], memory=report["memory"])


def _traceback_file(run_dir: Path, rank: int) -> Path:
    return run_dir / FOLDER / f"rank-{rank:05d}.txt"


ON_EVERY_NODE = "  to continue, start the same command again on every node"
"""The line that says how to continue a run of several nodes."""


def continuation(run_dir: Path, *, mistake: bool = False) -> str:
    """The line that says how to continue, possibly after a `mistake` was corrected."""
    when = "after the change" if mistake else "continue with"
    return f"  {when}: pipe resume {shlex.quote(str(run_dir))}"


def without_continuation(text: str, run_dir: Path) -> str:
    """A failure's text without the line that says how to continue."""
    for mistake in (False, True):
        text = text.removesuffix(f"\n{continuation(run_dir, mistake=mistake)}")
    return text

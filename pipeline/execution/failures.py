"""Reports of failed ranks, and the choice of the one that is shown.

failures/rank-N.json is for the launching process, failures/rank-N.txt is the traceback. Where a GPU
had no memory left, rank-N.memory.json.gz and rank-N.memory.txt say what was allocated."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from pipeline import errors
from pipeline.distributed import environment
from pipeline.errors import Memory, PipeError, Restart, RunFailed, in_words, is_user_error
from pipeline.utils.files import private_folder, read_all, remove_folder, replace_text
from pipeline.utils.foreign import read_whole
from pipeline.utils.terminal import shown

FOLDER = "failures"
UNDONE = "undone"
"""File in it: the command that failed has left the run as it was."""
MISTAKES = (
    errors.BadRows, errors.DataError, errors.EngineMismatch, errors.RecipeError,
    errors.ResumeRefused, errors.UsageError,
)  # fmt: skip
"""Errors that come again unless a person changes the recipe or the data."""
MOST_LINES = 12
"""Lines of an error's message that are kept; libraries append whole native stacks to theirs."""


class Exit(NamedTuple):
    """Exit code of a rank's process that ended by itself; a negative code is a signal's number."""

    rank: int
    code: int


class RankFailure(BaseModel):
    """A rank's error."""

    model_config = ConfigDict(strict=True)

    time: float
    rank: int
    slot: str
    message: str
    expected: bool
    """Whether a person can act on it, so that it needs no traceback."""
    refused: bool
    """Whether the rank refused to continue under the recipe that it was given."""
    mistake: bool = False
    """Whether it is one of MISTAKES."""
    memory: Memory
    """Kind of memory that the error is about; empty if it is about something else."""
    snapshot: str | None = None
    """File that says what held the GPU's memory."""
    restart: Restart
    place: str
    """The line that raised."""


def clear(run_dir: Path, *, restart: bool = False) -> None:
    """Forget the failures of an earlier command. Of a start that is repeated (`restart`) tracebacks
    stay until the next failure, or the next command."""
    for path in (run_dir / FOLDER).glob("rank-*.json") if restart else ():
        path.unlink(missing_ok=True)
    if not restart:
        remove_folder(run_dir / FOLDER)


def record(run_dir: Path, rank: int, slot: str, error: BaseException) -> None:
    """Write this rank's error, with the time, for the launching process to read. If the run's disk
    is full, the report goes to the launcher's file and the traceback to standard error."""
    from pipeline.chain.registry import line_in_plugin

    expected = is_user_error(error)
    memory: Memory = "host" if isinstance(error, MemoryError) else ""
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported for this
        memory = "device"
    # a failure that asks nothing of a person may have been an accident
    restart: Restart = "never" if expected else "after progress"
    snapshot: Path | None = None
    with contextlib.suppress(Exception):  # the report of the error matters more
        torch = sys.modules["torch"] if memory == "device" else None
        if torch is not None and torch.cuda.is_initialized():
            from pipeline.hardware import write_snapshot

            # the traceback keeps alive what the failed step had
            path = private_folder(run_dir / FOLDER) / f"rank-{rank:05d}.memory.json.gz"
            write_snapshot(path)
            snapshot = path
    *_, frame = None, *traceback.extract_tb(error.__traceback__)
    line = f"{frame.filename}:{frame.lineno} in {frame.name}" if frame else ""
    report = RankFailure(
        time=time.time(),
        rank=rank,
        slot=slot,
        message=shown(describe(error)),
        expected=expected,
        refused=isinstance(error, errors.ResumeRefused),
        mistake=isinstance(error, MISTAKES),
        memory=memory,
        snapshot=None if snapshot is None else str(snapshot),
        restart=error.restart if isinstance(error, PipeError) else restart,
        place=shown(line_in_plugin(error) or line),
    ).model_dump_json()
    trace = shown("".join(traceback.format_exception(error)))
    try:
        folder = private_folder(run_dir / FOLDER)
        replace_text(folder / f"rank-{rank:05d}.json", f"{report}\n")
        replace_text(folder / f"rank-{rank:05d}.txt", trace)
    except OSError:
        own = environment.shared
        if own is not None:
            with Path(f"/proc/self/fd/{own.failures}").open("a", encoding="utf-8") as memory_file:
                memory_file.write(f"{report}\n")
        if own is None or not expected:
            print(describe(error) if expected else trace, file=sys.stderr)


def describe(error: BaseException) -> str:
    """The error in one paragraph; a PipeError's message stands for itself."""
    if is_user_error(error):
        return in_words(error)
    name, lines = type(error).__name__, str(error).strip().splitlines()
    if len(lines) > MOST_LINES:
        lines = [*lines[:MOST_LINES], "..."]
    return f"{name}: " + "\n".join(lines) if lines else name


def first(
    run_dir: Path,
    exits: Sequence[Exit],
    slot: str | None = None,
    *,
    oom: bool = False,
    unwritten: Sequence[bytes] = (),
) -> RunFailed:
    """The error to show: of the rank that failed first.

    `exits` are of ranks that did not end well, earliest first and in rank order within one look,
    without what the launcher itself brought about; `slot` is the one that was running. `oom` says
    whether the system has killed a process here for lack of memory, `unwritten` has reports that
    the run's disk did not take. A rank that died without a word comes before ranks that raised,
    because a lost peer makes others raise, or has a library abort them."""
    found = reports(run_dir, unwritten)
    reported = {report.rank for report in found}
    silent = [end for end in exits if end.rank not in reported]
    causes = [end for end in silent if end.code != -signal.SIGABRT] or ([] if found else silent)
    if causes:
        end = causes[0]
        where = f"in slot `{slot}`" if slot else "before the first slot"
        killed = oom and -end.code == signal.SIGKILL
        how = "was killed by the system, which was out of memory," if killed else manner(end.code)
        text = f"rank {end.rank} {how} {where}\n  log: {run_dir}/logs/rank-{end.rank:05d}.log"
        text += f"\n{continuation(run_dir)}"
        return RunFailed(text, kind="died", restart="always", memory="host" if killed else "")
    if found:
        one = found[0]
        where = f"in slot `{one.slot}`" if one.slot else "before the first slot"
        lines = [f"rank {one.rank} failed {where}: {one.message}"]
        if not one.expected:
            lines.append(f"  at {one.place}")
            lines.append(f"  traceback: {run_dir / FOLDER}/rank-{one.rank:05d}.txt")
        if one.snapshot:
            lines.append(f"  what held the memory: {one.snapshot}")
        lines.append(continuation(run_dir, mistake=one.mistake))
        return RunFailed("\n".join(lines), restart=one.restart, memory=one.memory)
    return RunFailed(f"the run failed without saying why\n{continuation(run_dir)}")


def first_rank(run_dir: Path) -> int | None:
    """The rank that raised first, as far as this machine sees the folder."""
    return next((report.rank for report in reports(run_dir)), None)


def reports(run_dir: Path, unwritten: Sequence[bytes] = ()) -> list[RankFailure]:
    """Reports of ranks, earliest first, without incomplete ones."""
    texts: list[bytes] = []
    for path in (run_dir / FOLDER).glob("rank-*.json"):
        with contextlib.suppress(OSError):
            texts.append(read_whole(path, within=run_dir))
    own = environment.shared
    texts += unwritten if own is None else read_all(own.failures).splitlines()
    found = []
    for text in texts:
        with contextlib.suppress(ValueError):  # a folder that came from elsewhere holds anything
            found.append(RankFailure.model_validate_json(text))
    return sorted(found, key=lambda report: (report.time, report.rank))


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

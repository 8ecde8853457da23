"""Processes that measure something together, for a limited time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.distributed.environment import place
from pipeline.errors import in_words
from pipeline.hardware.host import cores_each
from pipeline.utils import jsonl
from pipeline.utils.process_tree import kill_sessions, none_left

LOOK_SECONDS = 0.02
LONGEST_REASON = 300
LONGEST_PRINTED = 4000


@dataclass(frozen=True, kw_only=True)
class Told:
    """What the processes told, by rank, and why there is no more: `failure`, empty if there is all,
    `late` if their time was up. `printed` is the end of what the process that failed printed."""

    records: tuple[tuple[dict[str, Any], ...], ...] = ()
    failure: str = ""
    late: bool = False
    printed: str = ""

    @property
    def all_records(self) -> tuple[dict[str, Any], ...]:
        """Those of every rank."""
        return tuple(record for rank in self.records for record in rank)


@dataclass(frozen=True, kw_only=True)
class _End:
    """How the processes ended: which failed and why; an empty text if none did."""

    failure: str = ""
    rank: int = 0
    late: bool = False


def measure(
    target: str,
    settings: Mapping[str, Any],
    *,
    procs: int,
    seconds: float,
    within: str | None = None,
) -> Told:
    """Call `target`, a `module:function(settings, tell)`, in `procs` processes at once. It is told
    a file too, `store`, in which the processes can meet.

    Whatever they do, this returns after `seconds` (and what it takes to start and kill processes),
    with what was told until then. No process outlives the call, and none outlives this process.
    Files of the measurement are in a folder of its own, that of temporary files or `within`.
    """
    try:
        scratch = tempfile.TemporaryDirectory(prefix="pipe-doctor-", dir=within)
    except OSError as error:
        return Told(failure=f"it has no folder for its files: {in_words(error)}")
    with scratch as name, none_left():
        folder = Path(name)
        started: list[subprocess.Popen[bytes]] = []
        try:
            started += _started(target, settings, procs, folder)
            end = _wait(started, folder, seconds)
        except OSError as error:
            end = _End(failure=f"no process could be started: {error}")
        finally:
            kill_sessions(started)
        records = [tuple(jsonl.read(told(folder, rank))) for rank in range(procs)]
        printed = _printed(folder, end.rank)[-LONGEST_PRINTED:] if end.failure else ""
        return Told(records=tuple(records), failure=end.failure, late=end.late, printed=printed)


def told(folder: Path, rank: int) -> Path:
    """Where a rank puts its records: apart from what libraries print."""
    return folder / f"rank-{rank}.jsonl"


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def _printed(folder: Path, rank: int) -> str:
    log = _log(folder, rank)
    return log.read_text("utf-8", errors="replace").strip() if log.exists() else ""


def _started(
    target: str, settings: Mapping[str, Any], procs: int, folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    # -P: what lies in the user's folder must not stand in for our modules
    command = [sys.executable, "-P", "-m", "pipeline.doctor.rank", target, str(folder)]
    command += [str(os.getpid()), json.dumps({**settings, "store": str(folder / "store")})]
    for rank in range(procs):
        with _log(folder, rank).open("wb") as log:
            yield subprocess.Popen(
                command, env=_environment(rank, procs), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip


def _environment(rank: int, procs: int) -> dict[str, str]:
    """As the ranks of a run have it: the cores shared among them."""
    return {"OMP_NUM_THREADS": str(cores_each(procs)), **os.environ, **place(rank, procs)}


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, seconds: float) -> _End:
    """Returns as soon as one failed, all ended well, or time is up."""
    deadline = time.monotonic() + seconds
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                return _End(failure=_reason(code, _printed(folder, rank)), rank=rank)
        if all(code == 0 for code in codes):
            return _End()
        if time.monotonic() > deadline:
            return _End(failure=f"given up after {seconds:.0f} s", late=True)
        time.sleep(LOOK_SECONDS)


def _reason(code: int, printed: str) -> str:
    if code < 0:
        return f"its process was killed ({signal.Signals(-code).name})"
    lines = printed.splitlines()
    return lines[-1][:LONGEST_REASON] if lines else f"exit code {code}"

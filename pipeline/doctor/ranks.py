"""Run a measurement in several processes, for a limited time."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.distributed.environment import rank_environment
from pipeline.errors import in_words
from pipeline.hardware.host import cores_each
from pipeline.utils import foreign
from pipeline.utils.processes import (
    kill_descendants,
    kill_sessions,
    received,
    start_child,
)

POLL_SECONDS = 0.02
LONGEST_REASON = 300
LONGEST_PRINTED = 4000


@dataclass(frozen=True, kw_only=True)
class RankResults:
    """Records that the ranks wrote, and why some may be missing."""

    records: tuple[tuple[dict[str, Any], ...], ...] = ()
    """Records by rank."""
    failure: str = ""
    """Reason in one line; empty if all ranks ended well."""
    late: bool = False
    """Whether the time limit was reached."""
    printed: str = ""
    """End of the output of the rank that failed."""

    @property
    def all_records(self) -> tuple[dict[str, Any], ...]:
        """Records of all ranks."""
        return tuple(record for rank in self.records for record in rank)


def measure(target: str, settings: Mapping[str, Any], *, procs: int, seconds: float) -> RankResults:
    """Call `target`, a `module:function(settings, record)`, in `procs` processes at once.

    `settings["store"]` names a file in which the processes can meet; `record` writes a result.

    Returns after `seconds`, plus the time to start and to kill processes, whatever these do. No
    process outlives the call or this process.
    """
    try:
        scratch = tempfile.TemporaryDirectory(prefix="pipe-doctor-")
    except OSError as error:
        return RankResults(failure=f"it has no folder for its files: {in_words(error)}")
    with scratch as name, kill_descendants():
        folder = Path(name)
        processes: list[subprocess.Popen[bytes]] = []
        try:
            processes += _start(target, settings, procs, folder)
            results = _wait(processes, folder, seconds)
        except OSError as error:
            results = RankResults(failure=f"no process could be started: {error}")
        finally:
            kill_sessions(processes)
        files = (folder / f"rank-{rank}.jsonl" for rank in range(procs))
        return replace(results, records=tuple(tuple(foreign.read_lines(file)) for file in files))


def _start(
    target: str, settings: Mapping[str, Any], procs: int, folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    message = {
        "target": target, "folder": str(folder),
        "settings": {**settings, "store": str(folder / "store")},
    }  # fmt: skip
    threads = {"OMP_NUM_THREADS": str(cores_each(procs))}
    for rank in range(procs):
        with (folder / f"rank-{rank}.log").open("wb") as log:
            yield start_child(
                "pipeline.doctor.ranks",
                message,
                env={**threads, **os.environ, **rank_environment(rank, procs)},
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, seconds: float) -> RankResults:
    """Wait until a rank fails, all end, or the time is up."""

    def printed(rank: int) -> str:
        log = (folder / f"rank-{rank}.log").read_text("utf-8", errors="replace")
        return log.strip()[-LONGEST_PRINTED:]

    deadline = time.monotonic() + seconds
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                said = printed(rank)
                reason = (said.splitlines() or [f"exit code {code}"])[-1][:LONGEST_REASON]
                if code < 0:
                    reason = f"its process was killed ({signal.Signals(-code).name})"
                return RankResults(failure=reason, printed=said)
        if all(code == 0 for code in codes):
            return RankResults()
        if time.monotonic() > deadline:
            failure = f"given up after {seconds:.0f} s"
            return RankResults(failure=failure, late=True, printed=printed(0))
        time.sleep(POLL_SECONDS)


def main(target: str, folder: str, settings: Mapping[str, Any]) -> None:
    """Call `target` in this rank; exit with code 1 and one line if it raises."""
    file = Path(folder) / f"rank-{os.environ['RANK']}.jsonl"
    module, _, function = target.partition(":")
    try:
        measurement = getattr(importlib.import_module(module), function)
        measurement(settings, lambda record: foreign.append_line(file, record))
    except Exception as error:
        print(" ".join(in_words(error).split()), file=sys.stderr, flush=True)
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # threads of communication libraries may never end


if __name__ == "__main__":
    main(**received(sys.argv[1], ends_with_parent=True))

"""What ranks were doing when one of them stood still, and the collectives they were in."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from pipeline.distributed.environment import DUMP
from pipeline.distributed.heartbeat import Heartbeats
from pipeline.distributed.watchdog import Stall
from pipeline.errors import RunFailed
from pipeline.execution import failures
from pipeline.launch.ranks import LocalRanks
from pipeline.utils.files import private_folder, replace_text
from pipeline.utils.terminal import shown


def landmarks(heartbeats: Heartbeats, ranks: int) -> int:
    """Checkpoints and durable results that the ranks have brought to an end."""
    return max((heartbeats.read(number).landmarks for number in range(ranks)), default=0)


FOLDER = "stalls"
"""Folder in the run's: one for each stall, with the stacks of all ranks and `report.json`."""
DUMP_SECONDS = 3.0
"""Seconds that ranks get to write their stacks."""
SHOWN_FRAMES = 4
"""Innermost calls of the stalled rank that are shown."""
COLLECTIVES = f"{FOLDER}/nccl"
"""Folder in the run's: the newest collectives of each rank, kept by NCCL's flight recorder. torch
writes them when a byte comes through a rank's pipe
(https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html); `torchfrtrace` reads
the files, which are torch's own pickles."""
ENTRIES = 2000
"""Collectives that each rank keeps in memory."""


def recorder_environment(run_dir: Path) -> dict[str, str]:
    """Variables with which ranks keep their newest collectives; what the user has set stays."""
    folder = run_dir / COLLECTIVES
    wanted = {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": str(ENTRIES),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{folder}/rank-",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{folder}/rank-",
    }
    if any(name in os.environ for name in wanted):
        return {}
    with contextlib.suppress(OSError):  # a full disk will be told by those who need it
        private_folder(run_dir / FOLDER)
        private_folder(folder)
        return wanted
    return {}


def request_collectives(run_dir: Path, ranks: Iterable[int]) -> None:
    """Have the ranks write what they keep; those without a recorder are passed over."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            pipe = os.open(run_dir / COLLECTIVES / f"rank-{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(pipe, b"1")
            finally:
                os.close(pipe)


def report_stall(
    run_dir: Path, slot: str | None, ranks: LocalRanks, stalls: Sequence[Stall]
) -> RunFailed:
    """Have all ranks of this machine write their stacks, keep those in the run's folder, and return
    the error that names the rank which stands still, the first of `stalls`."""
    before = [len(ranks.stacks(number)) for number in range(len(ranks.places))]
    request_collectives(run_dir, [ranks.rank(n) for n in range(len(ranks.places))])
    ranks.send(DUMP)
    ranks.send(signal.SIGCONT)  # a stopped process acts on a signal only when it goes on
    stacks = _written(ranks, before)
    culprit = stalls[0]
    text = f"rank {ranks.rank(culprit.number)} {culprit.describe()}"
    where = f"slot `{slot}`" if slot else "before the first slot"
    main = [
        line.strip() for line in stacks[culprit.number].rpartition("hread 0x")[2].splitlines()[1:]
    ]
    lines = [f"{text}, {where}", *[f"    {shown(line)}" for line in main[:SHOWN_FRAMES]]]
    with contextlib.suppress(OSError):  # a disk that does not answer may be what they wait for
        lines.append(f"  stacks of all ranks: {_keep(run_dir, text, ranks, stalls, stacks)}")
    lines.append(failures.continuation(run_dir))
    return RunFailed("\n".join(lines), kind="stalled", restart="always")


def _written(ranks: LocalRanks, before: Sequence[int]) -> list[str]:
    """The stack of each rank, once all have written theirs or the time is over."""
    deadline = time.monotonic() + DUMP_SECONDS
    while True:
        time.sleep(0.2)  # until one that has begun is done
        found = [ranks.stacks(number)[start:] for number, start in enumerate(before)]
        if all(found) or time.monotonic() > deadline:
            return found


def _keep(
    run_dir: Path, text: str, ranks: LocalRanks, stalls: Sequence[Stall], stacks: Sequence[str]
) -> Path:
    """Write the stacks and the report; returns their folder."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = private_folder(private_folder(run_dir / FOLDER) / stamp)
    found = {
        f"rank {ranks.rank(stall.number)}": {
            "phase": stall.beat.phase.name.lower(),
            "step": stall.beat.step,
            "seconds": round(stall.seconds, 1),
            "stopped": stall.stopped,
        }
        for stall in stalls
    }
    report = json.dumps({"time": time.time(), "problem": text, "stalled": found}, indent=1)
    replace_text(folder / "report.json", report + "\n")
    for number, stack in enumerate(stacks):
        written = shown(stack) or "this rank has not answered\n"
        replace_text(folder / f"rank-{ranks.rank(number):05d}.txt", written)
    return folder

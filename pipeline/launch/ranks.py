"""The processes of a run on this machine, and what they were doing when one of them stalls."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from pipeline.distributed.environment import DUMP, Shared
from pipeline.distributed.heartbeat import FIELDS, Stall, heartbeats
from pipeline.errors import RunFailed
from pipeline.execution import failures
from pipeline.execution.failures import Exit
from pipeline.execution.run_spec import RunSpec
from pipeline.hardware.host import oom_kills
from pipeline.utils.files import memory_file, private_folder, read_all, replace_text
from pipeline.utils.processes import kill_sessions, start_child
from pipeline.utils.terminal import hidden_variables, shown

SHUTDOWN_SECONDS = 10
"""Seconds that ranks get to end when one has failed, before they are killed."""
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


class LocalRanks:
    """Ranks on this machine, and the memory that they share with this process: their heartbeats,
    their stacks, and reports of failures that a full disk does not take.

    No rank, nor what it has started, outlives the body of this context manager. `stop`: asks, then
    kills; `__exit__`: kills at once; `kill_descendants`: what ranks left in other sessions.
    """

    def __init__(self, places: Sequence[dict[str, str]]) -> None:
        """`places` has the environment of each rank, by its number on this machine."""
        self.places = places
        self.processes: list[subprocess.Popen[bytes]] = []
        self._beats = memory_file("heartbeats", len(places) * FIELDS * 8)
        self.heartbeats = heartbeats(self._beats)
        self._stacks = [memory_file("stacks") for _ in places]
        self._failures = memory_file("failures")
        self._oom_kills = oom_kills()

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *error: object) -> None:
        kill_sessions(self.processes)
        for descriptor in (self._beats, self._failures, *self._stacks):
            os.close(descriptor)

    def start(self, spec: RunSpec, store: int | None = None, output: int | None = None) -> None:
        """Start all ranks of the run. They meet in the file `store`, if given; prints of rank 0 go
        to `output`, if given. Raises OSError."""
        message = {"spec": spec.dump(), "hidden": hidden_variables()}
        for place, stacks in zip(self.places, self._stacks, strict=True):
            shared = Shared(
                heartbeats=self._beats, failures=self._failures, stacks=stacks, store=store
            )
            files = asdict(shared)
            prints = output if int(place["RANK"]) == 0 else None
            process = start_child(
                "pipeline.execution.worker", {**message, "shared": files}, spec.run_dir,
                pass_fds=[file for file in files.values() if file is not None],
                env=os.environ | place, stdin=subprocess.DEVNULL, stdout=prints, stderr=prints,
                start_new_session=True,
            )  # fmt: skip
            self.processes.append(process)

    def rank(self, number: int) -> int:
        """The rank, among all nodes' ranks, of the one with this number on this machine."""
        return int(self.places[number]["RANK"])

    def ends(self) -> list[Exit]:
        """The ends of ranks that have ended."""
        codes = [process.poll() for process in self.processes]
        return [Exit(self.rank(n), code) for n, code in enumerate(codes) if code is not None]

    def landmarks(self) -> int:
        """Checkpoints and durable results that the ranks have brought to an end."""
        return max(rank.read().landmarks for rank in self.heartbeats)

    def send(self, number: int) -> None:
        """Send a signal to the ranks that are alive."""
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def stop(self) -> list[Exit]:
        """End the ranks that are left. Returns the ones that another signal than ours ended: a
        dying process can take longer to be gone than its peers take to notice."""
        self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        ends = self.ends()
        kill_sessions(self.processes)
        return [end for end in ends if 0 > end.code != -signal.SIGTERM]

    def end_and_explain(self, run_dir: Path, ends: Sequence[Exit], slot: str | None) -> RunFailed:
        """End the ranks that are left, and return the error of the one that failed first: `ends`
        did not end well, `slot` was running."""
        ends = [*ends, *self.stop()]
        unwritten = read_all(self._failures).splitlines()
        oom = oom_kills() > self._oom_kills
        return failures.first(run_dir, ends, slot, oom=oom, unwritten=unwritten)

    def stacks(self, since: Sequence[int] = ()) -> list[str]:
        """The stacks that each rank has written of its threads, from character `since` on."""
        texts = [read_all(stacks).decode(errors="replace") for stacks in self._stacks]
        return [text[at:] for text, at in zip(texts, since or [0] * len(texts), strict=True)]


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
    with contextlib.suppress(OSError):  # a full disk is reported by those who need it
        private_folder(run_dir / FOLDER)
        private_folder(folder)
        return wanted
    return {}


def request_collectives(run_dir: Path, ranks: Iterable[int]) -> None:
    """Have the ranks write what they keep; those without a recorder are passed over."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            pipe = os.open(run_dir / COLLECTIVES / f"rank-{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
            with os.fdopen(pipe, "wb", buffering=0) as file:
                file.write(b"1")


def report_stall(
    run_dir: Path, slot: str | None, ranks: LocalRanks, stalls: Sequence[Stall]
) -> RunFailed:
    """Have all ranks of this machine write their stacks, keep those in the run's folder, and return
    the error that names the rank which stands still, the first of `stalls`."""
    before = [len(text) for text in ranks.stacks()]
    request_collectives(run_dir, [ranks.rank(number) for number in range(len(ranks.places))])
    ranks.send(DUMP)
    ranks.send(signal.SIGCONT)  # a stopped process acts on a signal only when it goes on
    deadline, stacks = time.monotonic() + DUMP_SECONDS, [""]
    while not all(stacks) and time.monotonic() < deadline:
        time.sleep(0.2)  # until one that has begun is done
        stacks = ranks.stacks(before)
    culprit = stalls[0]
    text = f"rank {ranks.rank(culprit.number)} {culprit.describe()}"
    where = f"slot `{slot}`" if slot else "before the first slot"
    main = stacks[culprit.number].rpartition("hread 0x")[2].splitlines()[1:]
    frames = [f"    {shown(line.strip())}" for line in main[:SHOWN_FRAMES]]
    lines = [f"{text}, {where}", *frames]
    with contextlib.suppress(OSError):  # a disk that does not answer may be what they wait for
        lines.append(f"  stacks of all ranks: {_keep(run_dir, text, ranks, stalls, stacks)}")
    lines.append(failures.continuation(run_dir))
    return RunFailed("\n".join(lines), kind="stalled", restart="always")


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

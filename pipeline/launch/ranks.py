"""The processes of a run on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict

from pipeline.distributed.environment import FINISHED, Shared
from pipeline.distributed.heartbeat import Heartbeats
from pipeline.execution.failures import Exit
from pipeline.execution.run_spec import RunSpec
from pipeline.hardware.host import oom_kills
from pipeline.utils.files import memory_file, read_all
from pipeline.utils.processes import kill_sessions, start_child

SHUTDOWN_SECONDS = 10
"""Seconds that ranks get to end when one has failed, before they are killed."""


class LocalRanks:
    """Ranks on this machine, and the memory that they share with this process: their heartbeats,
    their stacks, and reports of failures that a full disk does not take.

    A context manager: no rank, and nothing that a rank has started, outlives the body.
    """

    def __init__(self, places: Sequence[dict[str, str]]) -> None:
        """`places` has the environment of each rank, by its number on this machine."""
        self.places = places
        self.heartbeats = Heartbeats(len(places))
        self.processes: list[subprocess.Popen[bytes]] = []
        self._stacks = [memory_file("stacks") for _ in places]
        self._failures = memory_file("failures")
        self._oom_kills = oom_kills()

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *error: object) -> None:
        kill_sessions(self.processes)
        self.heartbeats.close()
        for descriptor in (self._failures, *self._stacks):
            os.close(descriptor)

    def start(self, spec: RunSpec, store: int | None = None, output: int | None = None) -> None:
        """Start all ranks of the run. They meet in the file `store`, if
        given; prints of rank 0 go to `output`, if given. Raises OSError."""
        for place, stacks in zip(self.places, self._stacks, strict=True):
            shared = Shared(
                launcher=os.getpid(),
                heartbeats=self.heartbeats.descriptor,
                failures=self._failures,
                stacks=stacks,
                store=store,
            )
            files = shared.heartbeats, shared.failures, shared.stacks, shared.store
            prints = output if int(place["RANK"]) == 0 else None
            process = start_child(
                "pipeline.execution.worker", {"spec": spec.dump(), "shared": asdict(shared)},
                spec.run_dir,
                pass_fds=[file for file in files if file is not None], env=os.environ | place,
                stdin=subprocess.DEVNULL, stdout=prints, stderr=prints, start_new_session=True,
            )  # fmt: skip
            self.processes.append(process)

    def rank(self, number: int) -> int:
        """The rank, among all nodes' ranks, of the one with this number on this machine."""
        return int(self.places[number]["RANK"])

    def ends(self) -> list[Exit]:
        """The ends of ranks that have ended."""
        codes = [process.poll() for process in self.processes]
        return [Exit(self.rank(n), code) for n, code in enumerate(codes) if code is not None]

    def finished(self) -> bool:
        """Whether all stages of all ranks here have run."""
        return [end.code for end in self.ends()] == [FINISHED] * len(self.places)

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

    def oom(self) -> bool:
        """Whether the system has killed a process here for lack of memory since the start."""
        return oom_kills() > self._oom_kills

    def unwritten(self) -> list[bytes]:
        """Reports of failures that the run's disk did not take."""
        return read_all(self._failures).splitlines()

    def stacks(self, number: int) -> str:
        """Return what a rank has written of its threads' stacks so far."""
        return read_all(self._stacks[number]).decode(errors="replace")

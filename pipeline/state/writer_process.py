"""The training process's end of its writer."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from typing import IO

from pipeline.errors import CheckpointError
from pipeline.state.arena import Arena
from pipeline.state.writer import Job, Outcome, Setup


class WriterProcess:
    """Started once a run. Must be made by the main thread: it dies with the thread that made it."""

    def __init__(self, setup: Setup, arena: Arena) -> None:
        self._rank = setup.rank
        self._process = subprocess.Popen(
            # -P: what lies in the user's folder must not stand in for our modules
            [sys.executable, "-P", "-m", "pipeline.state.writer", str(arena.descriptor), _me()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[arena.descriptor],
        )  # fmt: skip
        self._send(setup.model_dump_json())

    def begin(self, job: Job) -> None:
        """Have the arena written; it must not change before the outcome is there."""
        self._send(job.model_dump_json())

    def poll(self) -> Outcome | None:
        """The outcome if it is there already. Raises CheckpointError when the writer is dead."""
        output = select.poll()  # select() refuses descriptors above 1023
        output.register(self._output, select.POLLIN | select.POLLHUP)
        return self.wait() if output.poll(0) else None

    def wait(self) -> Outcome:
        """The outcome. Raises CheckpointError when the writer is dead."""
        line = self._output.readline()
        if not line:
            raise self._dead()
        return Outcome.model_validate_json(line)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # what it did not read any more
                pipe.close()

    @property
    def _output(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def _send(self, text: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._dead() from None

    def _dead(self) -> CheckpointError:
        code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return CheckpointError(
            f"the process that writes rank {self._rank}'s checkpoints ended ({how})",
            hint="its messages are above or in the rank's log",
        )


def _me() -> str:
    return str(os.getpid())

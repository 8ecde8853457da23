"""The training process's end of its writer."""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import subprocess
import sys

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
        """Have a checkpoint written, whose first round is in the arena. A round must not change
        before it is taken, the last two not before the outcome is there."""
        self._send(job.model_dump_json())

    def go_on(self) -> None:
        """The next round is in the arena."""
        self._send("")

    def wait_taken(self) -> Outcome | None:
        """Wait until one more round is in the files; the outcome, if that has failed."""
        line = self._line()
        return Outcome.model_validate_json(line) if line.strip() else None

    def poll(self) -> Outcome | None:
        """The outcome if it is there already. Raises CheckpointError when the writer is dead."""
        output = select.poll()  # select() refuses descriptors above 1023
        output.register(self._output, select.POLLIN | select.POLLHUP)
        return self.wait() if output.poll(0) else None

    def wait(self) -> Outcome:
        """The outcome. Raises CheckpointError when the writer is dead."""
        return Outcome.model_validate_json(self._line())

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # what it did not read any more
                pipe.close()

    def _line(self) -> bytes:
        line = self._output.readline()
        if not line:
            raise self._dead()
        return line

    @property
    def _output(self) -> io.RawIOBase:
        """Without a buffer: `poll` would overlook a line that was read together with another."""
        assert isinstance(self._process.stdout, io.BufferedReader)
        raw: io.RawIOBase = self._process.stdout.raw
        return raw

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

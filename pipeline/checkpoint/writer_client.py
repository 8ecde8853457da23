"""A rank's writer, as its training process sees it: started, told of rounds, asked for results."""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import subprocess

from pipeline.checkpoint.snapshot_buffer import SnapshotBuffer
from pipeline.checkpoint.writer_protocol import SaveRequest, SaveResult, WriterSetup
from pipeline.distributed.signals import signals_blocked
from pipeline.errors import CheckpointError, WriterDied
from pipeline.utils.files import anonymous_file
from pipeline.utils.processes import own_module


class WriterProcess:
    """A rank's writer, started once a run. Must be made by the main thread: it dies with the
    thread that made it."""

    def __init__(self, setup: WriterSetup, buffer: SnapshotBuffer) -> None:
        self._rank = setup.rank
        command = own_module("pipeline.checkpoint.writer_main")
        # A pipe holds 64 KiB, and training would wait until Python has started and reads it.
        with os.fdopen(anonymous_file("setup"), "wb") as file:
            file.write(setup.model_dump_json().encode())
            file.flush()
            given = (file.fileno(), buffer.descriptor)
            with signals_blocked():  # it ignores ending signals, but not before Python has started
                self._process = subprocess.Popen(
                    [*command, *map(str, given), str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    pass_fds=given,
                )

    def begin(self, request: SaveRequest) -> None:
        """Start a save whose first round is in the buffer. A round must not change before it is
        taken, the last two not before the result is there."""
        self._send(request.model_dump_json())

    def go_on(self) -> None:
        """Announce that the next round is in the buffer."""
        self._send("")

    def wait_taken(self) -> SaveResult | None:
        """Wait until one more round is in the files; the result, if that has failed."""
        line = self._line()
        return SaveResult.model_validate_json(line) if line.strip() else None

    def poll(self) -> SaveResult | None:
        """The result if it is there already. Raises CheckpointError when the writer is dead."""
        output = select.poll()  # select() refuses descriptors above 1023
        output.register(self._output, select.POLLIN | select.POLLHUP)
        return self.wait() if output.poll(0) else None

    def wait(self) -> SaveResult:
        """The result. Raises CheckpointError when the writer is dead."""
        return SaveResult.model_validate_json(self._line())

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # input that it did not read any more
                pipe.close()

    def _line(self) -> bytes:
        line = self._output.readline()
        if not line:
            raise self._dead()
        return line

    @property
    def _output(self) -> io.RawIOBase:
        """Standard output without a buffer: `poll` would overlook a line that was read together
        with another."""
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
        return WriterDied(
            f"the process that writes rank {self._rank}'s checkpoints ended ({how})",
            hint="its messages are above or in the rank's log",
        )

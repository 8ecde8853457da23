"""A rank's writer, as its training process sees it, and the messages between the two, each one line
of JSON. Imports no torch: the writer reads the messages too."""

from __future__ import annotations

import contextlib
import io
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from pipeline.checkpoint.file_layout import Write
from pipeline.checkpoint.location import Retention
from pipeline.checkpoint.manifest import ManifestTemplate
from pipeline.distributed.signals import signals_blocked
from pipeline.errors import CheckpointError, WriterDied
from pipeline.utils.processes import start_child


class WriterSetup(BaseModel):
    """Constants of one rank's writer."""

    store: str
    rank: int
    world_size: int
    buffer_size: int
    """Bytes of the snapshot buffer."""
    files: Sequence[tuple[str, int]]
    """Names and sizes."""
    shared: bool
    """Whether ranks write parts of the same files; rank 0 writes the header."""
    rounds: Sequence[Sequence[Write]]
    """File by file, each from its start to its end."""
    template: ManifestTemplate | None
    """Rank 0 only."""
    retention: Retention


class SaveRequest(BaseModel):
    """Order to write one checkpoint."""

    name: str
    identity: str
    began: float
    """Time of the monotonic clock at which the save began."""
    facts: Mapping[str, Any] = {}
    """Fields `step`, `progress` and `state` of the manifest, on rank 0 only."""


class SaveResult(BaseModel):
    """Answer of a writer to its rank, and report to the writer of rank 0, in the transaction."""

    name: str
    problem: str = ""
    digest: int = 0
    """Digest of the rank's checksums."""
    address: str = ""
    size: int = 0
    """Bytes of the whole checkpoint's data, on rank 0."""
    seconds: float = 0.0
    """From the beginning of the save until the checkpoint was on disk, on rank 0."""
    ended: float = 0.0
    """Seconds since 1970 at which that was so."""
    user_seconds: float = 0.0
    """Processor time of this writer for the save; on rank 0 of all ranks' writers."""
    system_seconds: float = 0.0
    warnings: Sequence[str] = ()


class WriterProcess:
    """A rank's writer, started once a run, which maps the snapshot buffer of this descriptor. Must
    be made by the main thread: it dies with the thread that made it."""

    def __init__(self, setup: WriterSetup, buffer: int) -> None:
        self._rank = setup.rank
        message = {"setup": setup.model_dump_json(), "buffer": buffer}
        with signals_blocked():  # it ignores ending signals, but not before Python has started
            self._process = start_child(
                "pipeline.checkpoint.writer_main", message, pass_fds=[buffer],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        assert isinstance(self._process.stdout, io.BufferedReader)
        self._output: io.RawIOBase = self._process.stdout.raw
        """Without a buffer: `poll` would overlook a line that was read together with another."""

    def announce(self, request: SaveRequest | None = None) -> None:
        """Announce that a round is in the buffer: with a request, the first one of a save. It must
        not change until it is taken. Raises CheckpointError when the writer is dead."""
        text = request.model_dump_json() if request is not None else ""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._dead() from None

    def wait_written(self) -> SaveResult | None:
        """Wait until one more round is in the files; the result, if that has failed, or if it was
        the last. Raises CheckpointError when the writer is dead."""
        line: bytes = self._output.readline()
        if not line:
            raise self._dead()
        return SaveResult.model_validate_json(line) if line.strip() else None

    def poll(self) -> SaveResult | None:
        """The result if it is there already. Raises CheckpointError when the writer is dead."""
        output = select.poll()  # select() refuses descriptors above 1023
        output.register(self._output, select.POLLIN | select.POLLHUP)
        return self.wait() if output.poll(0) else None

    def wait(self) -> SaveResult:
        """The result. Raises CheckpointError when the writer is dead."""
        result = self.wait_written()
        assert result is not None
        return result

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # input that it did not read any more
                pipe.close()

    def _dead(self) -> CheckpointError:
        code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return WriterDied(
            f"the process that writes rank {self._rank}'s checkpoints ended ({how})",
            hint="its messages are above or in the rank's log",
        )

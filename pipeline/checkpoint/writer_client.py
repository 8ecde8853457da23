"""The training process's way of handing its share of the state to its writer."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.checkpoint import rng_state
from pipeline.checkpoint.layout import WritePlan, dtype, random_key
from pipeline.checkpoint.staging import Copy, SnapshotBuffer, Staging
from pipeline.checkpoint.writer_main import SaveRequest, SaveResult, Setup
from pipeline.errors import CheckpointError

if TYPE_CHECKING:
    from pipeline.contracts.engine import Engine, Fragment
    from pipeline.distributed.process_group import DistContext


class WriterProcess:
    """Started once a run. Must be made by the main thread: it dies with the thread that made it."""

    def __init__(self, setup: Setup, arena: SnapshotBuffer) -> None:
        self._rank = setup.rank
        # -P: what lies in the user's folder must not stand in for our modules
        command = [sys.executable, "-P", "-m", "pipeline.checkpoint.writer_main"]
        self._process = subprocess.Popen(
            [*command, str(arena.descriptor), _me()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[arena.descriptor],
        )
        self._send(setup.model_dump_json())

    def begin(self, job: SaveRequest) -> None:
        """Have a checkpoint written, whose first round is in the arena. A round must not change
        before it is taken, the last two not before the outcome is there."""
        self._send(job.model_dump_json())

    def go_on(self) -> None:
        """The next round is in the arena."""
        self._send("")

    def wait_taken(self) -> SaveResult | None:
        """Wait until one more round is in the files; the outcome, if that has failed."""
        line = self._line()
        return SaveResult.model_validate_json(line) if line.strip() else None

    def poll(self) -> SaveResult | None:
        """The outcome if it is there already. Raises CheckpointError when the writer is dead."""
        output = select.poll()  # select() refuses descriptors above 1023
        output.register(self._output, select.POLLIN | select.POLLHUP)
        return self.wait() if output.poll(0) else None

    def wait(self) -> SaveResult:
        """The outcome. Raises CheckpointError when the writer is dead."""
        return SaveResult.model_validate_json(self._line())

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


class Snapshot:
    """Copies into an arena what an engine holds at one moment."""

    def __init__(
        self, engine: Engine, dist: DistContext, plan: WritePlan, staging: Staging
    ) -> None:
        self._engine = engine
        self._dist = dist
        self._staging = staging
        self._dtypes = {entry.key: dtype(entry.dtype) for entry in plan.tensors}
        self._whole = {
            key: list(copies)
            for key, copies in groupby(sorted(staging.whole), key=lambda copy: copy.key)
        }
        self.arena = SnapshotBuffer(staging.size)
        for place, head in staging.heads:
            self.arena.memory[place : place + len(head)] = head

    def hand_over(self, writer: WriterProcess, job: SaveRequest) -> SaveResult | None:
        """Have the writer carry out `job`. Returns when the state may change; with the outcome if
        writing has failed by then."""
        with torch.no_grad():
            self._copy_whole()
            number = 0
            for copy, part, source in self._passing():
                while number < copy.round:
                    outcome = self._pass_on(writer, job, number)
                    if outcome is not None:
                        return outcome
                    number += 1
                self._copy(copy, part, source)
        last = len(self._staging.rounds) - 1
        assert number == last, "the last round passes nothing"
        return self._pass_on(writer, job, number)

    def _pass_on(self, writer: WriterProcess, job: SaveRequest, number: int) -> SaveResult | None:
        """Tell the writer of a round; wait until there is room for the next."""
        if number == 0:
            writer.begin(job)
        else:
            writer.go_on()
        following = number + 1
        wanted = 2 <= following < len(self._staging.rounds)
        return writer.wait_taken() if wanted else None

    def _copy_whole(self) -> None:
        for name, state in rng_state.capture(self._dist.device).items():
            key = random_key(self._dist.rank, name)
            source = torch.frombuffer(bytearray(state), dtype=torch.uint8)
            for copy in self._whole[key]:
                self._target(copy).copy_(source[copy.start : copy.stop])
        if all(key.startswith("random/") for key in self._whole):
            return
        for part, kind, tensor in self._tensors():
            for copy in self._whole.get(f"{kind}/{part.name}", ()):
                if part.start <= copy.start and copy.stop <= part.stop:
                    self._copy(copy, part, tensor)

    def _passing(self) -> Iterator[tuple[Copy, Fragment, Tensor]]:
        """Passing pieces, in order. An engine tells its fragments in an order of its own, so it is
        asked as often as it takes; once, where all are of one dtype and optimizer group."""
        left = self._staging.passing[::-1]
        while left:
            before = len(left)
            for part, kind, tensor in self._tensors():
                key = f"{kind}/{part.name}"
                while left and left[-1].key == key and part.start <= left[-1].start < part.stop:
                    yield left.pop(), part, tensor
                if not left:
                    return
            assert len(left) < before, f"{left[-1].key} is not there any more"

    def _tensors(self) -> Iterator[tuple[Fragment, str, Tensor]]:
        for part in self._engine.fragments():
            for kind, tensor in part.state.items():
                yield part, kind, tensor

    def _copy(self, copy: Copy, part: Fragment, tensor: Tensor) -> None:
        _copy(self._target(copy), tensor[copy.start - part.start : copy.stop - part.start])

    def _target(self, copy: Copy) -> Tensor:
        kind = self._dtypes[copy.key]
        size = (copy.stop - copy.start) * kind.itemsize
        memory = self.arena.memory[copy.place : copy.place + size]
        return torch.frombuffer(memory, dtype=kind)

    def close(self) -> None:
        """Give the memory back."""
        self.arena.close()


def _copy(target: Tensor, source: Tensor) -> None:
    """Both flat and of one dtype. In host memory the C library copies faster than torch."""
    if source.device.type == "cpu" and source.is_contiguous() and source.dtype == target.dtype:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel() * target.itemsize)
    else:
        target.copy_(source)

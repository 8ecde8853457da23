"""The training process's side of a save: a snapshot of its share of the state, and its writer."""

from __future__ import annotations

import contextlib
import ctypes
import io
import mmap
import os
import select
import signal
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.checkpoint import rng_state
from pipeline.checkpoint.staging import Copy, Staging
from pipeline.checkpoint.tiles import Tile
from pipeline.checkpoint.write_plan import DTYPES, WritePlan, random_key, tile_of
from pipeline.checkpoint.writer_protocol import SaveRequest, SaveResult, WriterSetup
from pipeline.distributed.signals import held_back
from pipeline.errors import CheckpointError, WriterDied
from pipeline.utils.files import anonymous_file
from pipeline.utils.page_lock import PageLock, address
from pipeline.utils.process_tree import own_module

if TYPE_CHECKING:
    from pipeline.contracts.engine import Engine
    from pipeline.distributed.process_group import DistContext


TAKEN_AT_ONCE = 64 << 20
"""Bytes: some hundredths of a second."""


class SnapshotBuffer:
    """`size` bytes that a child process can map too (`descriptor`)."""

    def __init__(self, size: int) -> None:
        self.descriptor = anonymous_file("snapshot")
        os.truncate(self.descriptor, max(size, 1))
        self._map = mmap.mmap(self.descriptor, max(size, 1))
        self.memory = memoryview(self._map)[:size]
        self._lock: PageLock | None = None
        self._closing = False

    def take(self, device: torch.device) -> None:
        """Take the memory from the system, so that no page fault stops the training loop, and lock
        the pages for copies from a GPU. Seconds for tens of GB, in which other threads go on."""
        for start in range(0, len(self.memory), TAKEN_AT_ONCE):
            if self._closing:
                return
            part = self.memory[start : start + TAKEN_AT_ONCE]
            ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(part)), 0, len(part))
        if device.type == "cuda":
            with torch.cuda.device(device):  # each thread has a current one
                self._lock = PageLock(self.memory)

    def end_taking(self) -> None:
        """Have `take`, which another thread may be in, return soon."""
        self._closing = True

    def close(self) -> None:
        """Release the memory, once no view of it is left."""
        if self._lock is not None:
            self._lock.close()
        self.memory.release()
        self._map.close()
        os.close(self.descriptor)


class WriterProcess:
    """A rank's writer, started once a run. Must be made by the main thread: it dies with the
    thread that made it."""

    def __init__(self, setup: WriterSetup, buffer: SnapshotBuffer) -> None:
        self._rank = setup.rank
        command = own_module("pipeline.checkpoint.writer_main")
        with held_back():  # it ignores ending signals, but not before Python has started
            self._process = subprocess.Popen(
                [*command, str(buffer.descriptor), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[buffer.descriptor],
            )
        self._send(setup.model_dump_json())

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


class Snapshot:
    """Copies an engine's state of one moment into a buffer that it makes. A thread takes the
    buffer's memory; the first save waits for it."""

    def __init__(
        self, engine: Engine, dist: DistContext, plan: WritePlan, staging: Staging
    ) -> None:
        self._engine = engine
        self._dist = dist
        self.staging = staging
        self._dtypes = {entry.key: DTYPES[entry.dtype] for entry in plan.template.tensors}
        self._whole: dict[str, list[Copy]] = defaultdict(list)
        for copy in staging.whole:
            self._whole[copy.key].append(copy)
        self.buffer = SnapshotBuffer(staging.size)
        self._address = address(self.buffer.memory)
        pool = ThreadPoolExecutor(1, "pipe-snapshot")
        self._filled = pool.submit(self._fill)
        pool.shutdown(wait=False)

    def _fill(self) -> None:
        """Take the memory and write what is the same in every save, beside the first steps."""
        self.buffer.take(self._dist.device)
        for place, head in self.staging.heads:
            self.buffer.memory[place : place + len(head)] = head

    def close(self) -> None:
        """Release the memory."""
        self.buffer.end_taking()
        wait([self._filled])
        self.buffer.close()

    def hand_over(self, writer: WriterProcess, request: SaveRequest) -> SaveResult | None:
        """Let the writer carry out `request`. Returns when the state may change; with the result if
        writing has failed by then. Raises what has kept the memory from being taken."""
        self._filled.result()
        with torch.no_grad():
            self._copy_whole()
            number = 0
            for copy, held, tensor in self._passing():
                while number < copy.round:
                    failed = self._pass_on(writer, request, number)
                    if failed is not None:
                        return failed
                    number += 1
                self._copy(copy, held, tensor)
        last = len(self.staging.rounds) - 1
        assert number == last, "the last round passes nothing"
        return self._pass_on(writer, request, number)

    def _pass_on(
        self, writer: WriterProcess, request: SaveRequest, number: int
    ) -> SaveResult | None:
        """Announce a round to the writer, once its copies have arrived; wait until there is room
        for the next."""
        if self._dist.device.type == "cuda":
            torch.cuda.current_stream(self._dist.device).synchronize()
        writer.go_on() if number else writer.begin(request)
        needs_room = 2 <= number + 1 < len(self.staging.rounds)
        return writer.wait_taken() if needs_room else None

    def _copy_whole(self) -> None:
        left = set(self.staging.whole)
        for name, state in rng_state.capture(self._dist.device).items():
            source = torch.frombuffer(bytearray(state), dtype=torch.uint8)
            for copy in self._whole.get(random_key(self._engine.random_stream, name), ()):
                self._copy(copy, Tile(0, source.numel()), source)
                left.discard(copy)
        for key, held, tensor in self._tensors() if left else ():
            for copy in self._whole.get(key, ()):
                if held.position(copy.start) is not None:
                    self._copy(copy, held, tensor)
                    left.discard(copy)
        # The buffer would hold an earlier save's bytes.
        assert not left, f"{min(left).key} is not there any more"

    def _passing(self) -> Iterator[tuple[Copy, Tile, Tensor]]:
        """Passing pieces, in order. An engine gives its fragments in an order of its own, so they
        are walked as often as it takes; once, if all are of one dtype and optimizer group."""
        left = self.staging.passing[::-1]
        while left:
            before = len(left)
            for key, held, tensor in self._tensors():
                while left and left[-1].key == key and held.position(left[-1].start) is not None:
                    yield left.pop(), held, tensor
                if not left:
                    return
            assert len(left) < before, f"{left[-1].key} is not there any more"

    def _tensors(self) -> Iterator[tuple[str, Tile, Tensor]]:
        """Keys of tensors, this rank's tiles of them, and what is in these."""
        for fragment in self._engine.fragments():
            held = tile_of(fragment)
            for kind, tensor in fragment.state.items():
                yield f"{kind}/{fragment.name}", held, tensor

    def _copy(self, copy: Copy, held: Tile, tensor: Tensor) -> None:
        """Copy into the buffer, from the elements of a tile; a GPU may still copy afterwards. In
        host memory the C library copies faster than torch."""
        first, dtype = held.position(copy.start), self._dtypes[copy.key]
        assert first is not None, f"{copy.key} is not there any more"
        assert first + copy.numel <= tensor.numel(), f"{copy.key} has changed its size"
        size = copy.numel * dtype.itemsize
        if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype == dtype:
            source = tensor.data_ptr() + first * dtype.itemsize
            ctypes.memmove(self._address + copy.place, source, size)
        else:
            memory = self.buffer.memory[copy.place : copy.place + size]
            target = torch.frombuffer(memory, dtype=dtype)
            target.copy_(tensor[first : first + copy.numel], non_blocking=True)

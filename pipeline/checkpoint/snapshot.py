"""A snapshot of a rank's share of the training state, handed to its writer in rounds."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.checkpoint.division import Tile
from pipeline.checkpoint.file_layout import HALVES, Staging, Write
from pipeline.checkpoint.write_plan import DTYPES, WritePlan, capture_random, random_key
from pipeline.checkpoint.writer import SaveRequest, SaveResult, WriterProcess
from pipeline.contracts.stage import ResourceNeed
from pipeline.errors import CheckpointError
from pipeline.utils.files import memory_file

if TYPE_CHECKING:
    from pipeline.contracts.engine import Engine
    from pipeline.distributed.process_group import DistContext

ALLOCATED_AT_ONCE = 64 << 20
"""Bytes of memory that are allocated at once: some hundredths of a second."""
_BUFFERS: weakref.WeakSet[SnapshotBuffer] = weakref.WeakSet()
"""All of this process: a recipe may train several times."""
Source = tuple[int, Write, Tile, Tensor]
"""A copy to make: its round, where it goes, and the elements of a tensor that it is taken from."""


def memory_need(dist: DistContext) -> ResourceNeed:
    """Memory that this machine's processes are still allocating for all snapshots (`_BUFFERS`)."""
    memory = sum(buffer.unallocated for buffer in _BUFFERS) * dist.local_world_size
    return ResourceNeed(what="copies of the training state", memory=memory, kept=True)


class SnapshotBuffer:
    """`size` bytes that a child process can map too (`descriptor`)."""

    def __init__(self, size: int) -> None:
        self.descriptor = memory_file("snapshot", max(size, 1))
        self._map = mmap.mmap(self.descriptor, max(size, 1))
        self.memory = memoryview(self._map)[:size]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.unallocated = size
        """Bytes that are not allocated yet."""
        self.locked = False
        """Whether the pages are locked in memory for a GPU."""
        self.closing = False
        """Has `allocate`, which another thread may be in, return soon."""
        _BUFFERS.add(self)

    def allocate(self, device: torch.device, heads: Iterable[tuple[int, bytes]] = ()) -> None:
        """Allocate the memory, so that no page fault stops the training loop, write `heads` into
        it, and lock the pages for copies from a GPU. Seconds for tens of GB, in which other threads
        continue. Raises CheckpointError for memory that the system does not give."""
        for start in range(0, len(self.memory), ALLOCATED_AT_ONCE):
            if self.closing:
                return
            size = min(ALLOCATED_AT_ONCE, len(self.memory) - start)
            try:
                os.posix_fallocate(self.descriptor, start, size)
            except OSError as error:
                raise CheckpointError(
                    f"memory for copies of the training state cannot be taken: {error.strerror}"
                ) from None
            # Pages that are there are still to be mapped, which takes a fault for each.
            ctypes.memset(self.address + start, 0, size)
            self.unallocated -= size
        for offset, head in heads:
            self.memory[offset : offset + len(head)] = head
        if device.type != "cuda" or not self.memory:
            return
        # Copies to locked pages run at the link's speed, while the host continues. Taking new
        # locked memory takes six times as long. The system may allow no more of them.
        with torch.cuda.device(device):  # each thread has a current one
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            size = len(self.memory)
            self.locked = int(runtime.cudaHostRegister(self.address, size, 0)) == 0
            if not self.locked:
                # CUDA's last error is no failure, and the next kernel would be taken for its cause
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device="cuda")

    def close(self) -> None:
        """Release the memory, once no view of it is left."""
        self.unallocated = 0
        if self.locked:
            with contextlib.suppress(RuntimeError):  # of a device that is lost
                torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]
        self.memory.release()
        self._map.close()
        os.close(self.descriptor)


class Snapshot:
    """Snapshot of the engine's state in a host buffer. A thread allocates the buffer, which the
    first save waits for, and copies while training continues."""

    def __init__(
        self, engine: Engine, dist: DistContext, plan: WritePlan, staging: Staging
    ) -> None:
        self._engine = engine
        self._dist = dist
        self.staging = staging
        self._dtypes = {entry.key: DTYPES[entry.dtype] for entry in plan.template.tensors}
        self._upfront: dict[str, list[Write]] = defaultdict(list)
        """Copies to make before anything is written, by tensor."""
        self._streamed: list[tuple[int, Write]] = []
        """Copies to make round by round, in order, each with its round."""
        for number, writes in enumerate(staging.rounds):
            for write in writes:
                if write.key in staging.streamed:
                    self._streamed.append((number, write))
                elif write.key:
                    self._upfront[write.key].append(write)
        self.buffer = SnapshotBuffer(staging.size)
        self._pool = ThreadPoolExecutor(1, "pipe-snapshot")
        self.filled = self._pool.submit(self.buffer.allocate, dist.device, staging.heads)
        """When the memory is allocated, and has what is the same in every save."""
        self.copied: Future[SaveResult | None] = Future()
        """When the state may change; the latest save's result, if it has failed by then."""

    def close(self) -> None:
        """Release the memory."""
        self.buffer.closing = True
        self._pool.shutdown()
        self.buffer.close()

    def start(
        self, writer: WriterProcess, request: SaveRequest, stable: Set[str] | None = None
    ) -> None:
        """Begin to let the writer carry out `request`. Tensors of the names in `stable` do not
        change until `copied` is done, and are copied in the background; None: everything is copied
        now, in this thread. Raises what has kept the memory from being allocated."""
        self.filled.result()
        with torch.no_grad():
            if stable is None:
                self.copied = Future()
                self.copied.set_result(self._copy_all(writer, request, self._sources()))
                return
            kept = []
            for number, write, tile, tensor in self._sources():
                is_stable = write.key.partition("/")[2] in stable
                # Buffers change in the next forward: small, so cloned.
                kept.append((number, write, tile, tensor if is_stable else tensor.clone()))
        reached: torch.cuda.Event | None = None
        if self._dist.device.type == "cuda":  # the state to save is there when this is over
            reached = torch.cuda.current_stream(self._dist.device).record_event()
        self.copied = self._pool.submit(self._copy_all, writer, request, kept, reached)

    def _copy_all(
        self,
        writer: WriterProcess,
        request: SaveRequest,
        sources: Iterable[Source],
        reached: torch.cuda.Event | None = None,
    ) -> SaveResult | None:
        """Copy, and announce each round to the writer; the result, if writing has failed. With an
        event, in a stream that waits until it is `reached`."""
        announced = 0
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())  # each thread has its own mode
            if reached is not None:
                stack.enter_context(torch.cuda.device(self._dist.device))
                own = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                own.wait_event(reached)
                stack.enter_context(torch.cuda.stream(own))
            for number, write, tile, tensor in sources:
                # Copies have the processors to themselves until they need the room of others.
                while number >= HALVES and announced < number:
                    self._announce(writer, request, announced)
                    announced += 1
                    failed = writer.wait() if announced >= HALVES else None
                    if failed is not None:
                        return failed
                self._copy(write, tile, tensor)
            for number in range(announced, len(self.staging.rounds)):
                self._announce(writer, request, number)
        return None

    def _announce(self, writer: WriterProcess, request: SaveRequest, number: int) -> None:
        """Tell the writer that a round is in the buffer, once its copies have arrived."""
        if self._dist.device.type == "cuda":
            torch.cuda.current_stream(self._dist.device).synchronize()
        writer.announce(None if number else request)

    def _sources(self) -> Iterator[Source]:
        """The copies of whole pieces: random states, and others in the engine's order; then of
        streamed pieces, in the order of their rounds. An engine yields its fragments in another
        order, so they are walked several times; once, if all are of one dtype and optimizer
        group."""
        left = set(itertools.chain(*self._upfront.values()))
        random = (
            (
                random_key(self._engine.random_stream, name), Tile(0, len(state)),
                torch.frombuffer(bytearray(state), dtype=torch.uint8),
            )
            for name, state in capture_random(self._dist.device).items()
        )  # fmt: skip
        for key, tile, tensor in itertools.chain(random, self._tensors()):
            if not left:
                break
            for write in self._upfront.get(key, ()):
                if tile.position(write.first_element) is not None:
                    yield 0, write, tile, tensor
                    left.discard(write)
        assert not left, f"{min(write.key for write in left)} no longer exists"
        streamed = self._streamed[::-1]
        while streamed:
            before = len(streamed)
            for key, tile, tensor in self._tensors():
                while streamed and streamed[-1][1].key == key:
                    number, write = streamed[-1]
                    if tile.position(write.first_element) is None:
                        break
                    streamed.pop()
                    yield number, write, tile, tensor
                if not streamed:
                    return
            assert len(streamed) < before, f"{streamed[-1][1].key} no longer exists"

    def _tensors(self) -> Iterator[tuple[str, Tile, Tensor]]:
        """Keys of tensors, this rank's tiles of them, and the elements."""
        for fragment in self._engine.fragments():
            tile = Tile(fragment.start, fragment.stop, fragment.stride, fragment.count)
            for kind, tensor in fragment.state.items():
                yield f"{kind}/{fragment.name}", tile, tensor

    def _copy(self, write: Write, tile: Tile, tensor: Tensor) -> None:
        """Copy into the buffer, from the elements of a tile; a GPU may still copy afterwards. In
        host memory the C library copies faster than torch."""
        first, dtype = tile.position(write.first_element), self._dtypes[write.key]
        numel = write.size // dtype.itemsize
        assert first is not None, f"{write.key} no longer exists"
        assert first + numel <= tensor.numel(), f"{write.key} changed its size"
        if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype == dtype:
            source = tensor.data_ptr() + first * dtype.itemsize
            ctypes.memmove(self.buffer.address + write.buffer_offset, source, write.size)
        else:
            memory = self.buffer.memory[write.buffer_offset : write.buffer_offset + write.size]
            target = torch.frombuffer(memory, dtype=dtype)
            target.copy_(tensor[first : first + numel], non_blocking=True)

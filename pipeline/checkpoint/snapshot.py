"""A snapshot of a rank's share of the training state, handed over to its writer in rounds."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.checkpoint import rng_state
from pipeline.checkpoint.snapshot_buffer import SnapshotBuffer
from pipeline.checkpoint.staging import Copy, Staging
from pipeline.checkpoint.tiles import Tile
from pipeline.checkpoint.write_plan import DTYPES, WritePlan, random_key, tile_of
from pipeline.checkpoint.writer_client import WriterProcess
from pipeline.checkpoint.writer_protocol import SaveRequest, SaveResult
from pipeline.utils.page_lock import address

if TYPE_CHECKING:
    from pipeline.contracts.engine import Engine
    from pipeline.distributed.process_group import DistContext


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

    def check(self) -> None:
        """Raise what has kept the memory from being taken, if that is known."""
        if self._filled.done():
            self._filled.result()

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
            announced = 0
            for copy, held, tensor in self._passing():
                # Copies have the processors to themselves until they need the room of others.
                while 2 <= copy.round and announced < copy.round:
                    self._announce(writer, request, announced)
                    announced += 1
                    failed = writer.wait_taken() if announced >= 2 else None
                    if failed is not None:
                        return failed
                self._copy(copy, held, tensor)
        for number in range(announced, len(self.staging.rounds)):
            self._announce(writer, request, number)
        return None

    def _announce(self, writer: WriterProcess, request: SaveRequest, number: int) -> None:
        """Tell the writer that a round is in the buffer, once its copies have arrived."""
        if self._dist.device.type == "cuda":
            torch.cuda.current_stream(self._dist.device).synchronize()
        writer.go_on() if number else writer.begin(request)

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

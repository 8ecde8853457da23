"""A snapshot of a rank's share of the training state, handed over to its writer in rounds."""

from __future__ import annotations

import ctypes
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.checkpoint import rng_state
from pipeline.checkpoint.snapshot_buffer import SnapshotBuffer
from pipeline.checkpoint.staging import Copy, Staging
from pipeline.checkpoint.tiles import Tile
from pipeline.checkpoint.write_plan import DTYPES, RANDOM, WritePlan, random_key, tile_of
from pipeline.checkpoint.writer_client import WriterProcess
from pipeline.checkpoint.writer_protocol import SaveRequest, SaveResult
from pipeline.utils.page_lock import address

if TYPE_CHECKING:
    from pipeline.contracts.engine import Engine
    from pipeline.distributed.process_group import DistContext


_RANDOM = f"{RANDOM}/"
Piece = tuple[Copy, Tile, Tensor]
"""A copy to make, and the elements of a tensor that it is taken from."""


class Snapshot:
    """Copies an engine's state of one moment into a buffer that it makes. A thread takes the
    buffer's memory, which the first save waits for, and makes the copies that training goes on
    beside."""

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
        self._pool = ThreadPoolExecutor(1, "pipe-snapshot")
        self._filled = self._pool.submit(self._fill)
        self._handed: Future[SaveResult | None] = Future()
        """Result of the latest hand-over."""

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
        self._pool.shutdown()
        self.buffer.close()

    def hand_over(
        self, writer: WriterProcess, request: SaveRequest, lasting: Set[str] | None = None
    ) -> None:
        """Begin to let the writer carry out `request`. Tensors of the names in `lasting` stay as
        they are until `wait` has returned, and are copied beside what this process does; None: all
        is copied now. Raises what has kept the memory from being taken."""
        self._filled.result()
        with torch.no_grad():
            self._copy_random_states()
            pieces: Iterable[Piece] = itertools.chain(self._copied_whole(), self._passing())
            if lasting is None:
                self._handed = Future()
                self._handed.set_result(self._pass_on(writer, request, pieces))
                return
            held = [
                (copy, tile, tensor if copy.key.partition("/")[2] in lasting else tensor.clone())
                for copy, tile, tensor in pieces
            ]
        reached: torch.cuda.Event | None = None
        if self._dist.device.type == "cuda":  # the state to save is there when this is over
            reached = torch.cuda.current_stream(self._dist.device).record_event()
        self._handed = self._pool.submit(self._beside, writer, request, held, reached)

    def wait(self) -> SaveResult | None:
        """Wait until the state may change; the result, if writing has failed by then."""
        return self._handed.result()

    @property
    def copied(self) -> bool:
        """Whether the state may change."""
        return self._handed.done()

    @torch.no_grad()  # each thread has its own mode
    def _beside(
        self,
        writer: WriterProcess,
        request: SaveRequest,
        pieces: Iterable[Piece],
        reached: torch.cuda.Event | None,
    ) -> SaveResult | None:
        """Pass pieces on from this thread, on a GPU in a stream of its own."""
        if reached is None:
            return self._pass_on(writer, request, pieces)
        with torch.cuda.device(self._dist.device):
            own = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(own):
            own.wait_event(reached)
            return self._pass_on(writer, request, pieces)

    def _pass_on(
        self, writer: WriterProcess, request: SaveRequest, pieces: Iterable[Piece]
    ) -> SaveResult | None:
        """Copy pieces, and announce each round to the writer; the result, if writing has failed."""
        announced = 0
        for copy, held, tensor in pieces:
            # Copies have the processors to themselves until they need the room of others.
            while copy.round >= 2 and announced < copy.round:
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

    def _copy_random_states(self) -> None:
        left = {copy for copy in self.staging.whole if copy.key.startswith(_RANDOM)}
        for name, state in rng_state.capture(self._dist.device).items():
            source = torch.frombuffer(bytearray(state), dtype=torch.uint8)
            for copy in self._whole.get(random_key(self._engine.random_stream, name), ()):
                self._copy(copy, Tile(0, source.numel()), source)
                left.discard(copy)
        _require_none(left)

    def _copied_whole(self) -> Iterator[Piece]:
        """Pieces that are copied whole, in the engine's order; random states are no part of it."""
        left = {copy for copy in self.staging.whole if not copy.key.startswith(_RANDOM)}
        for key, held, tensor in self._tensors() if left else ():
            for copy in self._whole.get(key, ()):
                if held.position(copy.start) is not None:
                    yield copy, held, tensor
                    left.discard(copy)
        _require_none(left)

    def _passing(self) -> Iterator[Piece]:
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
            assert len(left) < before, f"{left[-1].key} no longer exists"

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
        assert first is not None, f"{copy.key} no longer exists"
        assert first + copy.numel <= tensor.numel(), f"{copy.key} changed its size"
        size = copy.numel * dtype.itemsize
        if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype == dtype:
            source = tensor.data_ptr() + first * dtype.itemsize
            ctypes.memmove(self._address + copy.place, source, size)
        else:
            memory = self.buffer.memory[copy.place : copy.place + size]
            target = torch.frombuffer(memory, dtype=dtype)
            target.copy_(tensor[first : first + copy.numel], non_blocking=True)


def _require_none(left: Set[Copy]) -> None:
    """Require that no copy is left, for which the buffer would hold an earlier save's bytes."""
    assert not left, f"{min(left).key} no longer exists"

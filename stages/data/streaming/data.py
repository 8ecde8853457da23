"""Samples of `data.stream`, and their order: a pure function of the seed and of each shard's number
of blocks."""

from __future__ import annotations

import itertools
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline import ENDLESS, Context, Data, ModelSource, Sample, SampleOrder, Samples, StageError
from stages.data import tokenize
from stages.data.cache import cache_folder, digest
from stages.data.documents import Documents
from stages.data.fields import Source
from stages.data.prepare import source_entries
from stages.data.samples import CountedSamples
from stages.data.streaming.shards import (
    Shard,
    ShardIndex,
    ShardStore,
    edges,
    list_shards,
    read_index,
)

if TYPE_CHECKING:
    from stages.data.stream import StreamData


INDEX = "stream.jsonl"
"""Shard index in the run's folder."""
WINDOW_BITS, SHARD_BITS, BLOCK_BITS = 23, 20, 20
"""Bits of an index: a window's number, a shard's number, and a block's number in the shard."""


class Place(NamedTuple):
    """Shard and number of a block, and the window that it is read for."""

    window: int
    shard: int
    block: int


class StreamOrder:
    """Windows of shards, one behind the other, epoch after epoch.

    Epoch e visits the shards in the order of epoch e of SampleOrder, `window` at a time; the last
    window of an epoch may have fewer. Within window number g, counted over all epochs, blocks come
    in the order of epoch g of a SampleOrder. Without `shuffle` both are in their stored order.
    """

    size = ENDLESS

    def __init__(
        self, seed: int, *, shuffle: bool, shards: int, window: int, count: Callable[[int], int]
    ) -> None:
        """`count` returns a shard's number of blocks, which may need reading it. Raises StageError
        if there are more shards than an index can number."""
        _require(shards, SHARD_BITS, "shards")
        self._seed = seed
        self._shuffle = shuffle
        self._shards = SampleOrder(seed, shards, shuffle=shuffle)
        self._window = window
        self._windows = -(-shards // window)
        self._count = count
        self._starts = [0]
        """First position of each window so far, and of the next."""

    def indices(self, start: int, count: int) -> NDArray[np.int64]:
        """Return the indices of positions start ... start + count - 1; shape (count,)."""
        pieces = [np.empty(0, dtype=np.int64)]
        while count > 0:
            while self._starts[-1] <= start:
                number = len(self._starts) - 1
                self._starts.append(self._starts[-1] + sum(map(self._count, self.members(number))))
                if number + 1 == self._windows and not self._starts[-1]:
                    raise StageError("no shard has two tokens of text")
            number = bisect_right(self._starts, start) - 1
            taken = min(count, self._starts[number + 1] - start)
            pieces.append(self._blocks(number, start - self._starts[number], taken))
            start, count = start + taken, count - taken
        return np.concatenate(pieces)

    def members(self, number: int) -> list[int]:
        """Return the shards of a window."""
        epoch, place = divmod(number, self._windows)
        first, count = place * self._window, self._shards.size
        size = min(self._window, count - first)
        members: list[int] = self._shards.indices(epoch * count + first, size).tolist()
        return members

    def _blocks(self, number: int, offset: int, count: int) -> NDArray[np.int64]:
        _require(number + 1, WINDOW_BITS, "windows")
        members = np.array(self.members(number), dtype=np.int64)
        sizes = map(self._count, members.tolist())
        starts = np.array(list(itertools.accumulate(sizes, initial=0)), dtype=np.int64)
        size = int(starts[-1])
        _require(int(np.diff(starts).max()), BLOCK_BITS, "blocks in a shard")
        order = SampleOrder(self._seed, size, shuffle=self._shuffle)
        places = order.indices(number * size + offset, count)
        which = np.searchsorted(starts, places, side="right") - 1
        shards = (number << SHARD_BITS) | members[which]
        return (shards << BLOCK_BITS) | (places - starts[which])


def _require(count: int, bits: int, what: str) -> None:
    if count > 1 << bits:
        raise StageError(f"{count} {what} are more than the {1 << bits} that a stream can have")


def located(index: int) -> Place:
    """Return the place that an index encodes."""
    rest, block = divmod(index, 1 << BLOCK_BITS)
    return Place(*divmod(rest, 1 << SHARD_BITS), block)


class StreamSamples(CountedSamples):
    """Blocks of all shards, by the `Place` in an index. Reading a block of a window prepares the
    windows after it."""

    def __init__(self, stage: StreamData, store: ShardStore, shards: int) -> None:
        self._stage = stage
        self._store = store
        self._shards = shards
        self._order: StreamOrder | None = None
        self._prepared = 0
        """First window that has not been prepared."""

    def __len__(self) -> int:
        raise StageError(
            "the number of samples of a stream is not known",
            hint="give the train slot `steps` instead of `epochs`",
        )

    def __getitem__(self, index: int) -> Sample:
        place = self._place(index)
        return self._store.blocks(place.shard)[place.block]

    def total_targets(self, indices: NDArray[np.int64]) -> int:
        return sum(shard.total_targets(own) for shard, own in self._divided(indices))

    def total_rows(self, indices: NDArray[np.int64]) -> int:
        return sum(shard.total_rows(own) for shard, own in self._divided(indices))

    def _divided(self, indices: NDArray[np.int64]) -> Iterator[tuple[Samples, NDArray[np.int64]]]:
        """Yield each shard with its own indices of these samples."""
        # one by the index of the first block of its shard and window
        firsts, which = np.unique(indices >> BLOCK_BITS << BLOCK_BITS, return_inverse=True)
        for number, first in enumerate(firsts.tolist()):
            yield self._store.blocks(self._place(first).shard), indices[which == number] - first

    def order(self, seed: int, *, shuffle: bool) -> StreamOrder:
        self._prepared = 0
        self._order = StreamOrder(
            seed,
            shuffle=shuffle,
            shards=self._shards,
            window=self._stage.window,
            count=self._store.count,
        )
        return self._order

    def _place(self, index: int) -> Place:
        place = located(index)
        behind = place.window + 1 + self._stage.ahead
        if self._order is not None:
            for window in range(max(self._prepared, place.window + 1), behind):
                self._store.prepare(self._order.members(window))
        self._prepared = max(self._prepared, behind)
        return place


def stream_data(stage: StreamData, ctx: Context, model: ModelSource) -> Data:
    """Return the data of `data.stream` (collective)."""
    # one worker, this thread: processes must not be forked in the middle of training
    documents = Documents(stage, 1, ctx, model)
    main = ctx.dist.is_main
    text = json.dumps([asdict(shard) for shard in list_shards(stage.shards)]) if main else None
    shards = [Shard(**each) for each in json.loads(ctx.dist.broadcast_str(text))]
    ctx.dist.require_same("shards", {"their sizes, beginnings and ends": edges(shards)})
    store = _store(stage, ctx, documents, shards)
    ctx.on_exit(store.close)
    ctx.log.info("stream: %d shards, %d bytes", len(shards), sum(each.size for each in shards))
    held = None
    identity: dict[str, str | int | float | None] = {
        "stage": "data.stream",
        "contents": digest([[each.name, each.size] for each in shards]),
        "window": stage.window,
        "text_key": stage.text_key,
        **documents.identity,
    }
    if stage.heldout_files:
        sources = [Source(files=stage.heldout_files)]
        (entry,) = source_entries(documents, sources, stage.cache)
        held = documents.samples(entry)
        identity["heldout"] = documents.content(entry)
    return Data(
        train=StreamSamples(stage, store, len(shards)),
        heldout=held,
        pad_id=tokenize.pad_id(documents.tokenizer),
        packed=stage.documents_apart,
        identity=identity,
    )


def _store(
    stage: StreamData, ctx: Context, documents: Documents, shards: list[Shard]
) -> ShardStore:
    """Open the node's store of shards (collective)."""
    main, file, settings = ctx.dist.is_main, ctx.run_dir / INDEX, documents.settings_digest
    known = ctx.dist.broadcast_str(read_index(file, settings) if main else None)
    place = digest([str(ctx.run_dir.resolve()), ctx.slot])
    return ShardStore(
        shards=shards,
        folder=cache_folder(stage.cache) / f"stream-{place[:16]}",
        documents=documents,
        index=ShardIndex(file if main else None, settings, known),
        capacity=(stage.ahead + 2) * stage.window,
    )

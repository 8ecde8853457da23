"""Samples of `data.stream`: blocks of shards, whose windows are prepared ahead."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from pipeline.contracts.data import Data, Sample
from pipeline.contracts.model import ModelSource
from pipeline.errors import StageError
from stages.data import tokenize
from stages.data.cache import cache_folder, digest
from stages.data.documents import Documents
from stages.data.fields import Source
from stages.data.prepare import source_entry
from stages.data.samples import CountedSamples
from stages.data.streaming.order import Place, StreamOrder, first_blocks, located
from stages.data.streaming.shards import Shard, ShardIndex, ShardStore, list_shards

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pipeline.contracts.stage import Context
    from stages.data.stream import StreamData

INDEX = "stream.jsonl"
"""Shard index in the run's folder."""


class StreamSamples(CountedSamples):
    """Blocks of all shards, by the `Place` in an index. Reading a block of a window prepares the
    windows after it."""

    def __init__(self, store: ShardStore, shards: int, window: int, ahead: int) -> None:
        self._store = store
        self._shards = shards
        self._window = window
        self._ahead = ahead
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
        firsts, which = np.unique(first_blocks(indices), return_inverse=True)
        total = 0
        for number, first in enumerate(firsts.tolist()):
            shard = self._store.blocks(self._place(first).shard)
            total += shard.total_targets(indices[which == number] - first)
        return total

    def order(self, seed: int, *, shuffle: bool) -> StreamOrder:
        self._prepared = 0
        self._order = StreamOrder(
            seed, shuffle=shuffle, shards=self._shards, window=self._window, count=self._store.count
        )
        return self._order

    def _place(self, index: int) -> Place:
        place = located(index)
        following = range(max(self._prepared, place.window + 1), place.window + self._ahead + 1)
        self._prepared = max(self._prepared, following.stop)
        if self._order is not None:
            for window in following:
                self._store.prepare(self._order.members(window))
        return place


def stream_data(stage: StreamData, ctx: Context, model: ModelSource) -> Data:
    """Return the data of `data.stream` (collective)."""
    # one worker, this thread: processes must not be forked in the middle of training
    documents = Documents(stage, 1, ctx, model)
    main = ctx.dist.is_main
    text = json.dumps([asdict(shard) for shard in list_shards(stage.shards)]) if main else None
    shards = [Shard(**each) for each in json.loads(ctx.dist.broadcast_str(text))]
    store = _store(stage, ctx, documents, shards)
    ctx.on_exit(store.close)
    ctx.log.info("stream: %d shards, %d bytes", len(shards), sum(each.size for each in shards))
    held = None
    identity: dict[str, str | int | float | None] = {
        "stage": "data.stream",
        "tokenizer": tokenize.identity(documents.tokenizer),
        "contents": digest([[each.name, each.size] for each in shards]),
        "window": stage.window,
        "text_key": stage.text_key,
        "sequence_length": stage.sequence_length,
        "append_eos": stage.append_eos,
        "prepend_bos": bool(documents.start),
        "documents": stage.documents,
        "documents_apart": stage.documents_apart,
    }
    if stage.heldout_files:
        entry = source_entry(documents, Source(files=stage.heldout_files), stage.cache)
        held = documents.blocks(entry)
        identity["heldout"] = entry.key
    return Data(
        train=StreamSamples(store, len(shards), stage.window, stage.ahead),
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
    known = ctx.dist.broadcast_str(ShardIndex.read(file, settings) if main else None)
    place = digest([str(ctx.run_dir.resolve()), ctx.slot])
    return ShardStore(
        shards,
        cache_folder(stage.cache) / f"stream-{place[:16]}",
        documents,
        ShardIndex(file if main else None, settings, known),
        capacity=(stage.ahead + 2) * stage.window,
        cleans=ctx.dist.local_rank == 0,
    )

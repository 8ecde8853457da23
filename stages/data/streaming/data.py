"""The heavy half of `data.stream`."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.contracts.data import Data, Sample, Samples
from pipeline.contracts.model import ModelSource
from pipeline.errors import StageError, system_errors_as
from stages.data import tokenize
from stages.data.cache import Counts, Entry, cache_folder, digest
from stages.data.documents import TokenBlocks
from stages.data.fields import Source
from stages.data.prepare_text import Documents
from stages.data.sources import FilePart
from stages.data.streaming import shards
from stages.data.streaming.order import Place, StreamOrder, first_blocks, located
from stages.data.streaming.shards import Ledger, Shard
from stages.data.streaming.store import ShardStore, Tokeniser
from stages.data.tokenize import Announcer, Reading

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pipeline.contracts.stage import Context
    from stages.data.stream import StreamData

LEDGER = "stream.jsonl"
"""File in the run's folder: what shards have been read."""


class StreamSamples(Samples):
    """The blocks of all shards, by what `located` makes of an index. Whoever asks for a block of a
    window has the next windows prepared."""

    def __init__(self, store: ShardStore, shards: int, window: int, ahead: int) -> None:
        self._store = store
        self._shards = shards
        self._window = window
        self._ahead = ahead
        self._order: StreamOrder | None = None
        self._prepared = 0
        """The number of the first window that has not been prepared."""

    def __len__(self) -> int:
        raise StageError(
            "how many samples a stream has is not known",
            hint="give the train slot `steps` instead of `epochs`",
        )

    def __getitem__(self, index: int) -> Sample:
        place = self._place(index)
        return self._store.blocks(place.shard)[place.block]

    def targets(self, index: int) -> int:
        place = self._place(index)
        return self._store.blocks(place.shard).targets(place.block)

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
    """What the stage gives (collective)."""
    # one worker, this thread: processes must not be forked in the middle of training
    documents = Documents(stage, stage.cache, 1, ctx, model, model.tokenizer())
    corpus = _listed(stage, ctx)
    store = _store(stage, ctx, documents, corpus)
    ctx.on_exit(store.close)
    ctx.log.info("stream: %d shards, %d bytes", len(corpus), sum(each.size for each in corpus))
    held = None
    identity: dict[str, str | int | float | None] = {
        "stage": "data.stream",
        "tokenizer": tokenize.identity(documents.tokenizer),
        "contents": digest([[each.name, each.size] for each in corpus]),
        "window": stage.window,
        "text_key": stage.text_key,
        "sequence_length": stage.sequence_length,
        "append_eos": stage.append_eos,
        "prepend_bos": bool(documents.start),
        "documents": stage.documents,
        "documents_apart": stage.documents_apart,
    }
    if stage.heldout_files:
        entry = documents.entry(Source(files=stage.heldout_files))
        held = documents.blocks(entry)
        identity["heldout"] = entry.key
    return Data(
        train=StreamSamples(store, len(corpus), stage.window, stage.ahead),
        heldout=held,
        pad_id=tokenize.pad_id(documents.tokenizer),
        packed=stage.documents_apart,
        identity=identity,
    )


def _listed(stage: StreamData, ctx: Context) -> list[Shard]:
    """The shards that rank 0 sees (collective)."""
    text = json.dumps(shards.dump(shards.listed(stage.shards))) if ctx.dist.is_main else None
    return [Shard(**each) for each in json.loads(ctx.dist.broadcast_str(text))]


def _store(
    stage: StreamData, ctx: Context, documents: Documents, corpus: list[Shard]
) -> ShardStore:
    """What this process reads shards through (collective)."""
    main = ctx.dist.is_main
    file = ctx.run_dir / LEDGER
    known = ctx.dist.broadcast_str(Ledger.read(file, documents.making) if main else None)
    place = digest([str(ctx.run_dir.resolve()), ctx.slot])
    return ShardStore(
        corpus,
        cache_folder(stage.cache) / f"stream-{place[:16]}",
        Tokeniser(
            build=functools.partial(_build, documents),
            open=lambda entry: _opened(documents, entry),
            making=documents.making,
            sequence_length=stage.sequence_length,
        ),
        Ledger(file if main else None, documents.making, known),
        capacity=(stage.ahead + 2) * stage.window,
        cleans=ctx.dist.local_rank == 0,
    )


def _build(
    documents: Documents, shard: Shard, path: Path, folder: Path, stop: Callable[[], bool]
) -> Counts:
    """Tokenise one shard; a corpus may have some without text."""
    began = time.monotonic()
    with system_errors_as(StageError):
        reading = Reading(total=path.stat().st_size)
    log = documents.ctx.log
    reader = dataclasses.replace(
        documents.reader(),
        blank=lambda part: log.warning("stream: %s has no text", shard.address),
    )
    writer = documents.writer(Announcer(log=log, reading=reading, unit="documents"))
    counts = writer.write(folder, _until(stop, reader.read([FilePart(path)], reading)))
    seconds = time.monotonic() - began
    log.debug("stream: %s: %d tokens, %.1f s", shard.address, counts["tokens"], seconds)
    return counts


def _until(stop: Callable[[], bool], documents: Iterable[str]) -> Iterator[str]:
    for document in documents:
        if stop():
            raise StageError("the run ends")
        yield document


def _opened(documents: Documents, entry: Entry) -> TokenBlocks:
    tokenize.check_ids(documents.model, entry.counts["largest"])
    return documents.blocks(entry)

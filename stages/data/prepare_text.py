"""The heavy half of `data.text`."""

from __future__ import annotations

import functools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.contracts.data import Data
from pipeline.contracts.model import ModelSource
from pipeline.errors import DataError
from stages.data import tokenize
from stages.data.cache import KEYS, Counts, Entry, cache_folder, digest, prepare
from stages.data.documents import STARTS, TOKENS, DocumentReader, TokenBlocks, TokenWriter
from stages.data.fields import split
from stages.data.sources import Opened, open_source
from stages.data.tokenize import Announcer
from stages.data.views import joined, mixed

if TYPE_CHECKING:
    from pipeline.contracts.stage import Context
    from stages.data.fields import DocumentSettings, Source
    from stages.data.text import TextData


def text_data(stage: TextData, ctx: Context, model: ModelSource) -> Data:
    """What the stage gives (collective)."""
    work = Documents(stage, stage.cache, stage.workers, ctx, model, model.tokenizer())
    trained_on = stage.trained_on()
    entries = [work.entry(source) for source in trained_on]
    held_entries = [work.entry(source) for source in stage.held_out()]
    cuts = [split(len(work.blocks(entry)), stage.heldout_fraction) for entry in entries]
    held = [work.blocks(entry) for entry in held_entries]
    if stage.heldout_fraction:
        held = [work.blocks(entry, cut) for entry, cut in zip(entries, cuts, strict=True)]
    weights = [source.weight for source in trained_on]
    return Data(
        train=mixed(
            [work.blocks(entry, 0, cut) for entry, cut in zip(entries, cuts, strict=True)], weights
        ),
        heldout=joined(held),
        pad_id=tokenize.pad_id(work.tokenizer),
        packed=stage.documents_apart,
        identity={
            "stage": "data.text",
            "tokenizer": tokenize.identity(work.tokenizer),
            "contents": digest([entry.key for entry in (*entries, *held_entries)]),
            "weights": json.dumps(weights),
            "sequence_length": stage.sequence_length,
            "append_eos": stage.append_eos,
            "prepend_bos": bool(work.start),
            "documents": stage.documents,
            "documents_apart": stage.documents_apart,
            "heldout_fraction": stage.heldout_fraction,
        },
    )


@dataclass(frozen=True)
class Documents:
    """Makes the cache entries of sources, and blocks of them."""

    settings: DocumentSettings
    cache: str | None
    workers: int | None
    ctx: Context
    model: ModelSource
    tokenizer: Any

    @functools.cached_property
    def dtype(self) -> str:
        return tokenize.id_dtype(self.tokenizer)

    @functools.cached_property
    def start(self) -> list[int]:
        """Ids before each document. Raises StageError when the tokenizer lacks a token that is
        asked for."""
        return tokenize.start_ids(self.tokenizer, self.settings.prepend_bos)

    def entry(self, source: Source) -> Entry:
        """The tokens of all documents of a source (collective)."""
        started = time.monotonic()
        opened = functools.cache(functools.partial(open_source, source))
        entry = prepare(
            self.ctx,
            cache_folder(self.cache),
            lambda: self._key(opened()),
            lambda folder: self._build(opened(), folder),
        )
        tokenize.check_ids(self.model, entry.counts["largest"])
        self._report(source, entry, time.monotonic() - started)
        return entry

    def blocks(self, entry: Entry, first: int = 0, count: int | None = None) -> TokenBlocks:
        """Some blocks of an entry, all by default."""
        starts = entry.array(STARTS, "<i8")[:] if self.settings.documents_apart else None
        tokens = entry.array(TOKENS, self.dtype)
        return TokenBlocks(tokens, self.settings.sequence_length, first, count, starts=starts)

    def _key(self, opened: Opened) -> str:
        return digest(["text", KEYS, opened.digest, self.making])

    @functools.cached_property
    def making(self) -> str:
        """Digest of what decides which tokens a document becomes."""
        own = self.settings
        settings: list[Any] = [own.text_key, own.documents, own.append_eos, bool(own.prepend_bos)]
        if own.prepend_bos is None and self.start:
            settings.append(self.start)
        return digest([tokenize.identity(self.tokenizer), settings])

    def _build(self, opened: Opened, folder: Path) -> Counts:
        reading = opened.reading()
        writer = self.writer(Announcer(log=self.ctx.log, reading=reading, unit="documents"))
        counts = writer.write(folder, self.reader().read(opened.parts, reading))
        if counts["tokens"] < 2:
            raise DataError("fewer than two tokens of text", file=str(opened.source))
        return counts

    def reader(self) -> DocumentReader:
        """What finds the documents in files."""
        return DocumentReader(text_key=self.settings.text_key, unit=self.settings.documents)

    def writer(self, announcer: Announcer) -> TokenWriter:
        """What tokenises them. Raises StageError when the tokenizer lacks a token that is asked
        for."""
        end = []
        if self.settings.append_eos:
            end = [tokenize.required_id(self.tokenizer, "eos_token", "append_eos")]
        return TokenWriter(
            tokenizer=self.tokenizer,
            dtype=self.dtype,
            prefix=self.start,
            suffix=end,
            batch_documents=self.settings.batch_documents,
            workers=self.workers,
            announcer=announcer,
        )

    def _report(self, source: Source, entry: Entry, seconds: float) -> None:
        blocks = len(self.blocks(entry))
        self.ctx.log.info(
            "%s: %d documents, %d tokens, %d samples, %.1f s (%s %s)",
            source, entry.counts["documents"], entry.counts["tokens"], blocks, seconds,
            "cached in" if entry.reused else "tokenised into", entry.folder,
        )  # fmt: skip

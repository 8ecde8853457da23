"""Documents of running text: read from sources, tokenised into one stream, cut into blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline import Context, DataError, ModelSource
from pipeline.utils import activity, counted
from stages.data import tokenize
from stages.data.cache import KEYS, Counts, Entry, digest
from stages.data.encodings import plain_ids
from stages.data.mistakes import Enough, Mistakes
from stages.data.notes import Note, write_notes
from stages.data.pieces import cutter
from stages.data.rows import TEXT, Report, raised, read_text, require_text
from stages.data.samples import BAD, CHANGED, STARTS, TOKENS, TokenBlocks
from stages.data.sources import OpenedSource, Part

if TYPE_CHECKING:
    from stages.data.fields import DocumentSettings


Unit = Literal["file", "line"]
_BATCH = 256
"""Pieces of documents per call of the tokenizer."""
_LARGEST_CALL = 1_000_000
"""Characters per call of the tokenizer, unless one piece has more."""
Piece = tuple[str, bool, bool]
"""A part of a document's text, and whether the document begins and ends with it."""


def read_documents(
    parts: Iterable[Part],
    *,
    text_key: str,
    unit: Unit,
    blank: bool = False,
    mistakes: Mistakes | None = None,
) -> Iterator[str]:
    """Yield every document that is not blank, in the order of parts and rows.

    `unit` is the extent of a document in a plain text file. `mistakes` is given a DataError for
    each row without text, for a file that cannot be read and, unless `blank`, for a part without
    text; the first one is raised without `mistakes`.
    """
    report, report_file = (mistakes.report, mistakes.add_file) if mistakes else (raised, raised)
    for part in parts:
        found, before = False, mistakes.count if mistakes else 0
        try:
            for text in _texts(part, text_key, unit, report):
                if text.strip():
                    found = True
                    yield text
            if not (found or blank or (mistakes and mistakes.count > before)):
                raise DataError("no text in this file", file=part.name)
        except Enough:
            return
        except DataError as error:
            report_file(error)


def _texts(part: Part, key: str, unit: Unit, report: Report) -> Iterator[str]:
    if not str(part.name).endswith(TEXT):
        for row in part.rows([key], report):
            try:
                if key not in row.value:
                    hint = "set `text_key`"
                    raise row.error(f"no key {key!r}; it has {sorted(row.value)}", hint=hint)
                text = require_text(row, row.value[key], f"{key!r}")
            except DataError as error:
                report(error)
            else:
                yield text
    elif unit == "line":
        for row in part.rows(report=report):
            yield row.value["text"]
    else:
        yield read_text(Path(part.name)).replace("\r\n", "\n")


def _pieces(documents: Iterable[str], cut: Callable[[str], list[str]]) -> Iterator[Piece]:
    for document in documents:
        pieces = cut(document)
        for number, piece in enumerate(pieces, 1):
            yield piece, number == 1, number == len(pieces)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        length = len(piece[0])
        size += length
        if batch and (len(batch) == _BATCH or size > _LARGEST_CALL):
            yield batch
            batch, size = [], length
        batch.append(piece)
    if batch:
        yield batch


def formatted(counts: Counts) -> list[Note]:
    """Return a note on the documents that had a begin or end token of their own."""
    if CHANGED not in counts:
        return []
    said = f"{counted(counts[CHANGED], 'documents')} {tokenize.FORMATTED}"
    return [Note(text=said, part=0, row=0)]


class Documents:
    """Tokenises the documents of sources into cache entries, and opens them as blocks."""

    def __init__(
        self, settings: DocumentSettings, workers: int | None, ctx: Context, model: ModelSource
    ) -> None:
        """Raise StageError if the tokenizer lacks the start or end token that is set."""
        self.settings, self.workers, self.ctx, self.model = settings, workers, ctx, model
        self.tokenizer = model.tokenizer()
        self.tokenizer_identity = tokenize.identity(self.tokenizer)
        ctx.dist.require_same("tokenizer", {"tokenizer": self.tokenizer_identity})
        self._cut = cutter(self.tokenizer)
        self.dtype = tokenize.id_dtype(self.tokenizer)
        self.start = tokenize.start_ids(self.tokenizer, settings.prepend_bos)
        self.end = []
        if settings.append_eos:
            self.end = [tokenize.required_id(self.tokenizer, "eos_token", "append_eos")]
        making: list[Any] = [settings.text_key, settings.documents, settings.append_eos]
        making.append(bool(settings.prepend_bos))
        if settings.prepend_bos is None and self.start:
            making.append(self.start)
        self.settings_digest = digest([self.tokenizer_identity, making])
        """Digest of everything that decides which tokens a document becomes."""
        self.identity: dict[str, str | int] = {
            "tokenizer": self.tokenizer_identity,
            "sequence_length": settings.sequence_length,
            "append_eos": settings.append_eos,
            "prepend_bos": bool(self.start),
            "documents": settings.documents,
            "documents_apart": settings.documents_apart,
        }
        """Everything that decides the samples of a text, for the identity of the data."""

    def key(self, opened: OpenedSource) -> str:
        """Return the cache key of a source. An entry without its bad rows has one of its own, since
        it says nothing of them."""
        content = digest(["text", KEYS, opened.digest, self.settings_digest])
        return f"{content}-drop" if self.settings.bad_rows == "drop" else content

    def content(self, entry: Entry) -> str:
        """Return what decides an entry's tokens: its key, with the number of rows that were dropped
        and that of those that earlier versions encoded otherwise, if there are any."""
        content, dropped = entry.key.partition("-")[0], entry.counts.get(BAD)
        changed = entry.counts.get(CHANGED)
        more = [f"-{dropped}" if dropped else "", f"-{CHANGED}:{changed}" if changed else ""]
        return content + "".join(more)

    def build(self, opened: OpenedSource, folder: Path) -> Counts:
        """Tokenise a source into a folder. Raises the error of its mistakes, and DataError if it
        has no target."""
        mistakes = Mistakes(opened.parts, self.settings.bad_rows)
        counts = self.write(folder, self.read(opened.parts, mistakes))
        mistakes.check(counts["documents"] + mistakes.count)
        if counts["tokens"] < 2:
            raise DataError("fewer than two tokens of text", file=str(opened.source))
        write_notes(folder, [*mistakes.notes(), *formatted(counts)])
        return counts | ({BAD: mistakes.count} if mistakes.count else {})

    def samples(self, entry: Entry, first: int = 0, count: int | None = None) -> TokenBlocks:
        """Open some blocks of an entry, all by default."""
        starts = entry.array(STARTS, "<i8")[:] if self.settings.documents_apart else None
        tokens = entry.array(TOKENS, self.dtype)
        return TokenBlocks(tokens, self.settings.sequence_length, first, count, starts=starts)

    def size(self, entry: Entry) -> int:
        """Return the number of blocks of an entry."""
        return len(self.samples(entry))

    def read(
        self, parts: Iterable[Part], mistakes: Mistakes, *, blank: bool = False
    ) -> Iterator[str]:
        """Yield the documents of a source's parts, as `read_documents` does."""
        key, unit = self.settings.text_key, self.settings.documents
        return read_documents(parts, text_key=key, unit=unit, blank=blank, mistakes=mistakes)

    def write(self, folder: Path, documents: Iterable[str]) -> Counts:
        """Write the ids of all documents as one stream, and the place of the first token of each
        document that has one. Returns `documents`, `tokens`, `largest` (id), and as CHANGED the
        documents that had a begin or end token of their own, if any did.

        The memory needed is bounded by the longest documents.
        """
        counts = {"documents": 0, "tokens": 0, "largest": 0}
        batches = _batches(_pieces(documents, self._cut))
        waiting = np.empty(0, np.int64)
        """Place of a document that has no token yet."""
        with (
            (folder / TOKENS).open("wb") as tokens,
            (folder / STARTS).open("wb") as starts,
            activity(tokenize.TOKENISING, unit="documents") as doing,
        ):
            for _, (ids, begins, changed) in tokenize.map_batches(
                self._encode, batches, self.workers
            ):
                ids.tofile(tokens)
                places = np.unique(np.concatenate([waiting, begins + counts["tokens"]]))
                counts["tokens"] += len(ids)
                waiting = places[places == counts["tokens"]]
                places[places < counts["tokens"]].astype("<i8").tofile(starts)
                counts["documents"] += len(begins)
                if changed:
                    counts[CHANGED] = counts.get(CHANGED, 0) + changed
                counts["largest"] = max(counts["largest"], int(ids.max(initial=0)))
                self.ctx.dist.heartbeat.beat()
                doing.advance(len(begins))
        return counts

    def _encode(self, batch: list[Piece]) -> tuple[NDArray[Any], NDArray[np.int64], int]:
        """Return the ids of all pieces, one after another, and where in these documents begin;
        shapes (tokens,) and (documents that begin here,); and the number of begin and end tokens
        that documents had already."""
        ids, begins, changed = list[int](), list[int](), 0
        end_token = self.tokenizer.eos_token
        found = plain_ids(self.tokenizer, [text for text, _, _ in batch])
        for (text, first, last), inside in zip(batch, found, strict=True):
            begun = first and bool(self.start) and tokenize.begins_with(inside, self.start)
            ended = last and bool(self.end) and tokenize.ends_with(text, end_token)
            if first:
                begins.append(len(ids))
                ids += [] if begun else self.start
            ids += inside
            if last:
                ids += [] if ended else self.end
            changed += begun or ended
        return np.array(ids, self.dtype), np.array(begins, np.int64), changed

"""Documents of running text: read from sources, tokenised into one stream, cut into blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline import Context, DataError, ModelSource
from pipeline.utils import activity, counted
from stages.data import tokenize
from stages.data.cache import KEYS, Counts, Entry, digest
from stages.data.encodings import plain_ids
from stages.data.mistakes import Enough, Mistakes, Note, write_notes
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


class Document(NamedTuple):
    """A text, the file that has it, and the number of its row, from 1; 0 for a whole file."""

    text: str
    file: str | Path
    row: int


class Piece(NamedTuple):
    """A part of a document's text, whether the document begins and ends with it, and its file and
    row."""

    text: str
    first: bool
    last: bool
    file: str | Path
    row: int


def read_documents(
    parts: Iterable[Part],
    *,
    text_key: str,
    unit: Unit,
    blank: bool = False,
    mistakes: Mistakes | None = None,
) -> Iterator[Document]:
    """Yield every document that is not blank, in the order of parts and rows.

    `unit` is the extent of a document in a plain text file. `mistakes` is given a DataError for
    each row without text, for a file that cannot be read and, unless `blank`, for a part without
    text; the first one is raised without `mistakes`.
    """
    report, report_file = (mistakes.report, mistakes.add_file) if mistakes else (raised, raised)
    for part in parts:
        found, before = False, mistakes.count if mistakes else 0
        try:
            for document in _documents(part, text_key, unit, report):
                if document.text.strip():
                    found = True
                    yield document
            if not (found or blank or (mistakes and mistakes.count > before)):
                raise DataError("no text in this file", file=part.name)
        except Enough:
            return
        except DataError as error:
            report_file(error)


def _documents(part: Part, key: str, unit: Unit, report: Report) -> Iterator[Document]:
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
                yield Document(text, row.file, row.number)
    elif unit == "line":
        for row in part.rows(report=report):
            yield Document(row.value["text"], row.file, row.number)
    else:
        yield Document(read_text(Path(part.name)).replace("\r\n", "\n"), part.name, 0)


def _batches(
    documents: Iterable[Document], cut: Callable[[str], list[str]]
) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for text, file, row in documents:
        pieces = cut(text)
        for number, piece in enumerate(pieces, 1):
            size += len(piece)
            if batch and (len(batch) == _BATCH or size > _LARGEST_CALL):
                yield batch
                batch, size = [], len(piece)
            batch.append(Piece(piece, number == 1, number == len(pieces), file, row))
    if batch:
        yield batch


def formatted(counts: Counts, first: Piece | None, mistakes: Mistakes) -> list[Note]:
    """Return a note on the documents that had a begin or end token of their own, the `first` of
    which is given by a piece."""
    if first is None:
        return []
    said = f"{counted(counts[CHANGED], 'documents')} {tokenize.FORMATTED}"
    return [Note(text=said, part=mistakes.part(first.file), row=first.row)]


class Documents:
    """Tokenises the documents of sources into cache entries, and opens them as blocks."""

    def __init__(
        self, settings: DocumentSettings, workers: int | None, ctx: Context, model: ModelSource
    ) -> None:
        """Raise StageError if the tokenizer lacks the start or end token that is set."""
        self.settings, self.workers, self.ctx, self.model = settings, workers, ctx, model
        self.tokenizer = model.tokenizer()
        self.tokenizer_identity = tokenize.tokenizer_identity(self.tokenizer)
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

    def told(self, counts: Counts) -> Iterator[str]:
        """Yield what a source holds, in words."""
        yield counted(counts["documents"], "documents")
        yield counted(counts["tokens"], "tokens")

    def build(self, opened: OpenedSource, folder: Path) -> Counts:
        """Tokenise a source into a folder. Raises the error of its mistakes, and DataError if it
        has no target."""
        mistakes = Mistakes(opened.parts, self.settings.bad_rows)
        counts, first = self.write(folder, self.read(opened.parts, mistakes))
        mistakes.check(counts["documents"] + mistakes.count)
        if counts["tokens"] < 2:
            raise DataError("fewer than two tokens of text", file=str(opened.source))
        write_notes(folder, [*mistakes.notes(), *formatted(counts, first, mistakes)])
        return counts | ({BAD: mistakes.count} if mistakes.count else {})

    def samples(self, entry: Entry, first: int = 0, count: int | None = None) -> TokenBlocks:
        """Open some blocks of an entry, all by default."""
        starts = entry.array(STARTS, "<i8")[:] if self.settings.documents_apart else None
        tokens = entry.array(TOKENS, self.dtype)
        return TokenBlocks(tokens, self.settings.sequence_length, first, count, starts=starts)

    def size(self, entry: Entry) -> int:
        """Return the number of blocks of an entry."""
        return len(self.samples(entry))

    def cut(self, entry: Entry, count: int) -> int:
        """Return `count`: blocks are parted anywhere."""
        return count

    def read(
        self, parts: Iterable[Part], mistakes: Mistakes, *, blank: bool = False
    ) -> Iterator[Document]:
        """Yield the documents of a source's parts, as `read_documents` does."""
        key, unit = self.settings.text_key, self.settings.documents
        return read_documents(parts, text_key=key, unit=unit, blank=blank, mistakes=mistakes)

    def write(self, folder: Path, documents: Iterable[Document]) -> tuple[Counts, Piece | None]:
        """Write the ids of all documents as one stream, and the place of the first token of each
        document that has one. Returns `documents`, `tokens`, `largest` (id), and as CHANGED the
        documents that had a begin or end token of their own, if any did; and a piece of the first
        of those.

        The memory needed is bounded by the longest documents.
        """
        counts = {"documents": 0, "tokens": 0, "largest": 0}
        first: Piece | None = None
        changed = False
        batches = _batches(documents, self._cut)
        waiting = np.empty(0, np.int64)
        """Place of a document that has no token yet."""
        with (
            (folder / TOKENS).open("wb") as tokens,
            (folder / STARTS).open("wb") as starts,
            activity(tokenize.TOKENISING, unit="documents") as doing,
        ):
            for batch, (ids, begins, own) in tokenize.map_batches(
                self._encode, batches, self.workers
            ):
                ids.tofile(tokens)
                places = np.unique(np.concatenate([waiting, begins + counts["tokens"]]))
                counts["tokens"] += len(ids)
                waiting = places[places == counts["tokens"]]
                places[places < counts["tokens"]].astype("<i8").tofile(starts)
                counts["documents"] += len(begins)
                for piece, has in zip(batch, own, strict=True):
                    changed = has or (changed and not piece.first)
                    if changed and piece.last:
                        counts[CHANGED] = counts.get(CHANGED, 0) + 1
                        first = first or piece
                counts["largest"] = max(counts["largest"], int(ids.max(initial=0)))
                self.ctx.dist.heartbeat.beat()
                doing.advance(len(begins))
        return counts, first

    def _encode(self, batch: list[Piece]) -> tuple[NDArray[Any], NDArray[np.int64], list[bool]]:
        """Return the ids of all pieces, one after another, and where in these documents begin;
        shapes (tokens,) and (documents that begin here,); and whether each piece has the begin or
        the end token of its document already."""
        ids, begins, own = list[int](), list[int](), list[bool]()
        end_token = self.tokenizer.eos_token
        found = plain_ids(self.tokenizer, [piece.text for piece in batch])
        for (text, first, last, *_), inside in zip(batch, found, strict=True):
            begun = first and bool(self.start) and tokenize.begins_with(inside, self.start)
            ended = last and bool(self.end) and tokenize.ends_with(text, end_token)
            if first:
                begins.append(len(ids))
                ids += [] if begun else self.start
            ids += inside
            if last:
                ids += [] if ended else self.end
            own.append(begun or ended)
        return np.array(ids, self.dtype), np.array(begins, np.int64), own

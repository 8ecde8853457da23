"""Documents of running text: read from sources, tokenised into one stream, cut into blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline import Context, DataError, ModelSource
from pipeline.utils import activity, counted
from stages.data import tokenize
from stages.data.cache import KEYS, Counts, Entry, VerifiedArray
from stages.data.fields import DocumentSettings
from stages.data.mistakes import Enough, Mistakes, Note, write_notes
from stages.data.rows import TEXT, Row, raised, read_text, require_text
from stages.data.samples import BAD, CHANGED, STARTS, TOKENS, Entries, TokenBlocks
from stages.data.sources import OpenedSource, Part
from stages.data.tokenizer_compat import cutter
from stages.digests import digest

_BATCH = 256
"""Pieces of documents per call of the tokenizer."""
_LARGEST_CALL = 1_000_000
"""Characters per call of the tokenizer, unless one piece has more."""


class Document(NamedTuple):
    """A text, or a piece of one: its file, the number of its row, from 1 (0 for a whole file), and
    whether the text begins and ends with it."""

    text: str
    file: str | Path
    row: int
    first: bool = True
    last: bool = True


def read_documents(
    parts: Iterable[Part],
    *,
    text_key: str,
    unit: str,
    blank: bool = False,
    mistakes: Mistakes | None = None,
) -> Iterator[Document]:
    """Yield every document that is not blank, in the order of parts and rows. `unit` is the extent
    of a document in a plain text file: "file" or "line". `mistakes` gets a DataError for each row
    without text, for a file that cannot be read and, unless `blank`, for a part without text; the
    first one is raised without `mistakes`."""
    report, report_file = (mistakes.report, mistakes.add_file) if mistakes else (raised, raised)
    for part in parts:
        plain = str(part.name).endswith(TEXT)
        key = "text" if plain else text_key
        found, before = False, mistakes.count if mistakes else 0
        try:
            if plain and unit == "file":
                text = read_text(Path(part.name)).replace("\r\n", "\n")
                rows = iter([Row(file=part.name, number=0, value={"text": text})])
            else:
                rows = part.rows(None if plain else [key], report)
            for row in rows:
                try:
                    if key not in row.value:
                        message = f"no key {key!r}; it has {sorted(row.value)}"
                        raise row.error(message, hint="set `text_key`")
                    # A whole file has been decoded as UTF-8.
                    text = row.value[key]
                    text = require_text(row, text, f"{key!r}") if row.number else text
                except DataError as error:
                    report(error)
                    continue
                if text.strip():
                    found = True
                    yield Document(text, row.file, row.number)
            if not (found or blank or (mistakes and mistakes.count > before)):
                raise DataError("no text in this file", file=part.name)
        except Enough:
            return
        except DataError as error:
            report_file(error)


def _batches(
    documents: Iterable[Document], cut: Callable[[str], list[str]]
) -> Iterator[list[Document]]:
    batch, size = list[Document](), 0
    for text, file, row, *_ in documents:
        pieces = cut(text)
        for number, piece in enumerate(pieces, 1):
            size += len(piece)
            if batch and (len(batch) == _BATCH or size > _LARGEST_CALL):
                yield batch
                batch, size = [], len(piece)
            batch.append(Document(piece, file, row, number == 1, number == len(pieces)))
    if batch:
        yield batch


class DocumentEntries(Entries):
    """Tokenises the documents of sources, each source as one stream."""

    def __init__(
        self, settings: DocumentSettings, cache: str | None, workers: int | None, ctx: Context,
        model: ModelSource,
    ) -> None:  # fmt: skip
        """Raise StageError if the tokenizer lacks the start or end token that is set."""
        super().__init__(ctx, model, cache)
        self.settings, self.workers = settings, workers
        identity = tokenize.tokenizer_identity(self.tokenizer)
        ctx.dist.require_same("tokenizer", {"tokenizer": identity})
        self._cut = cutter(self.tokenizer)
        self.dtype = tokenize.id_dtype(self.tokenizer)
        self.start, self.end = tokenize.start_ids(self.tokenizer, settings.prepend_bos), list[int]()
        if settings.append_eos:
            self.end = [tokenize.required_id(self.tokenizer, "eos_token", "append_eos")]
        making: list[Any] = [settings.text_key, settings.documents, settings.append_eos]
        making.append(bool(settings.prepend_bos))
        if settings.prepend_bos is None and self.start:
            making.append(self.start)
        self.settings_digest = digest([identity, making])
        """Digest of everything that decides which tokens a document becomes."""
        names = ("sequence_length", "append_eos", "documents", "documents_apart")
        same = {name: getattr(settings, name) for name in names}
        self.settings_identity = {"tokenizer": identity, "prepend_bos": bool(self.start), **same}
        """The settings that decide the samples of a text, for the identity of the data."""

    def key(self, opened: OpenedSource) -> str:
        # An entry without its bad rows has another key, since it says nothing of them.
        content = digest(["text", KEYS, opened.digest, self.settings_digest])
        return f"{content}-drop" if self.settings.bad_rows == "drop" else content

    def content(self, entry: Entry) -> str:
        """Return what decides an entry's tokens: its key, with the number of rows that were dropped
        and of documents that earlier versions encoded otherwise, if there are any."""
        bad, changed = entry.counts.get(BAD), entry.counts.get(CHANGED)
        more = [f"-{bad}" if bad else "", f"-{CHANGED}:{changed}" if changed else ""]
        return entry.key.partition("-")[0] + "".join(more)

    def identity(self, entries: Sequence[Entry]) -> Mapping[str, str | int | float | None]:
        contents = digest([self.content(entry) for entry in entries])
        return {"stage": "data.text", "contents": contents, **self.settings_identity}

    def told(self, counts: Counts) -> Iterator[str]:
        yield counted(counts["documents"], "documents")
        yield counted(counts["tokens"], "tokens")

    def samples(self, entry: Entry, first: int = 0, count: int | None = None) -> TokenBlocks:
        tokens, starts = VerifiedArray(entry.folder / TOKENS, self.dtype), None
        if self.settings.documents_apart:
            starts = VerifiedArray(entry.folder / STARTS, "<i8")[:]
        return TokenBlocks(tokens, self.settings.sequence_length, first, count, starts=starts)

    def build(self, opened: OpenedSource, folder: Path) -> Counts:
        """Tokenise a source. Raises the error of its mistakes, and DataError without a target."""
        counts, notes = self.tokenise(opened.parts, folder)
        if counts["tokens"] < 2:
            raise DataError("fewer than two tokens of text", file=str(opened.source))
        write_notes(folder, notes)
        return counts

    def tokenise(
        self,
        parts: Sequence[Part],
        folder: Path,
        *,
        blank: bool = False,
        watch: Callable[[Iterator[Document]], Iterator[Document]] = iter,
    ) -> tuple[Counts, list[Note]]:
        """Tokenise the documents of parts, each seen by `watch`, into a folder; return counts and
        what to report. Raises the error of their mistakes."""
        mistakes = Mistakes(parts, self.settings.bad_rows)
        documents = read_documents(
            parts, text_key=self.settings.text_key, unit=self.settings.documents, blank=blank,
            mistakes=mistakes,
        )  # fmt: skip
        counts, changed = self.write(folder, watch(documents))
        notes = mistakes.check(counts["documents"] + mistakes.count)
        if changed is not None:
            said = f"{counted(counts[CHANGED], 'documents')} {tokenize.FORMATTED}"
            notes.append(Note(said, *mistakes.place(changed.file, changed.row)))
        return counts | ({BAD: mistakes.count} if mistakes.count else {}), notes

    def write(self, folder: Path, documents: Iterable[Document]) -> tuple[Counts, Document | None]:
        """Write the ids of all documents as one stream, and the place of the first token of each
        document that has one. Returns `documents`, `tokens`, `largest` (id), and as CHANGED the
        documents that had a begin or end token already, if any did; and a piece of the first of
        those. The memory needed is bounded by the longest documents."""
        counts, changed = {"documents": 0, "tokens": 0, "largest": 0}, False
        first: Document | None = None
        waiting = np.empty(0, np.int64)  # place of a document that has no token yet
        batches = _batches(documents, self._cut)
        with (
            (folder / TOKENS).open("wb") as tokens,
            (folder / STARTS).open("wb") as starts,
            activity(tokenize.TOKENISING, unit="documents") as doing,
        ):
            results = tokenize.map_batches(self._encode, batches, self.workers)
            for batch, (ids, begins, own) in results:
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

    def _encode(self, batch: list[Document]) -> tuple[NDArray[Any], NDArray[np.int64], list[bool]]:
        """Return the ids of all pieces, one after another, and where in these documents begin;
        shapes (tokens,) and (documents that begin here,); and whether each piece has the begin or
        the end token of its document already."""
        ids, begins, own = list[int](), list[int](), list[bool]()
        found = tokenize.plain_ids(self.tokenizer, [piece.text for piece in batch])
        for (text, _, _, first, last), inside in zip(batch, found, strict=True):
            begun = first and bool(self.start) and inside[: len(self.start)] == self.start
            ended = last and bool(self.end) and text.rstrip().endswith(self.tokenizer.eos_token)
            if first:
                begins.append(len(ids))
                ids += [] if begun else self.start
            ids += inside
            if last:
                ids += [] if ended else self.end
            own.append(begun or ended)
        return np.array(ids, self.dtype), np.array(begins, np.int64), own

"""Samples of `data.chat` and `data.text`: sources are tokenised into cache entries, then mapped."""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline import BadRows, Context, Data, DataError, ModelSource, Samples, StageError
from pipeline.utils import counted
from stages.data import tokenize
from stages.data.cache import KEYS, Counts, Entry, cache_folder, digest, prepare, prepare_locally
from stages.data.documents import Documents
from stages.data.encode import RowEncoder
from stages.data.encodings import TextTokenizer
from stages.data.forms import rows_with_forms
from stages.data.mistakes import Mistakes, read_notes, together
from stages.data.samples import (
    BAD,
    CHANGED,
    CUT,
    DROPPED,
    FORM,
    NULLS,
    MaskedSamples,
    row_starts,
    write_samples,
)
from stages.data.sources import OpenedSource, open_source
from stages.data.views import PackedSamples, train_and_heldout, write_packs

if TYPE_CHECKING:
    from stages.data.chat import ChatData
    from stages.data.fields import Source
    from stages.data.text import TextData


_BATCH = 64
"""Rows that a process encodes at a time."""
_SETTINGS = (
    "form", "template", "today", "loss", "special_tokens", "sequence_length", "too_long"
)  # fmt: skip
"""Fields of `data.chat` that decide which tokens a row becomes."""
_TREATMENTS = {"unrendered": "error", "empty": "train"}
"""Fields of `data.chat` that decide which rows are dropped, with the values that older runs had.
They matter to the identity of data only where rows are."""
SHORTER = "sequence_length tokens; earlier versions kept one more"
"""What the identity of data with truncated rows says of them."""
_SEPARATOR = "-"
"""Between the parts of a cache key: digests of the contents, and of the ids that texts begin with;
and what decides which rows are dropped, since an entry without them says nothing of them. That is
`bad_rows`, with the size of the vocabulary, which decides which `input_ids` are bad; and others of
_TREATMENTS than older runs had."""


def source_entries(
    work: Documents | Rows, sources: Sequence[Source], cache: str | None
) -> list[Entry]:
    """Return the cache entries of sources, tokenised if they are absent (collective). Raises the
    DataError or BadRows of all sources together."""
    opened = [functools.cache(functools.partial(open_source, source)) for source in sources]
    if len(sources) > 1:
        with work.ctx.dist.rank0_first() as main:
            if main:
                _build_all(work, opened, cache)
    return [_entry(work, source, each, cache) for source, each in zip(sources, opened, strict=True)]


def _build_all(
    work: Documents | Rows, opened: Sequence[Callable[[], OpenedSource]], cache: str | None
) -> None:
    """Build the absent entries of all sources, whatever is wrong with others."""
    errors = list[DataError | BadRows]()
    for each in opened:
        try:
            key = work.key(each())
            prepare_locally(cache_folder(cache), key, functools.partial(work.build, each()))
        except (DataError, BadRows) as error:
            errors.append(error)
    if errors:
        raise together(errors)


def _entry(
    work: Documents | Rows, source: Source, opened: Callable[[], OpenedSource], cache: str | None
) -> Entry:
    started = time.monotonic()
    entry = prepare(
        work.ctx,
        cache_folder(cache),
        lambda: work.key(opened()),
        lambda folder: work.build(opened(), folder),
    )
    tokenize.check_ids(work.model, entry.counts["largest"])
    seconds = time.monotonic() - started
    counts = ", ".join(work.told(entry.counts))
    work.ctx.log.info("%s: %s, %.1f s", source, counts, seconds)
    work.ctx.log.debug("%s: largest id %d, in %s", source, entry.counts["largest"], entry.folder)
    if work.ctx.dist.is_main:  # which has opened the source
        for note in read_notes(entry):
            work.ctx.log.warning("%s", note.told([part.name for part in opened().parts]))
    return entry


def _entries(stage: ChatData | TextData, work: Documents | Rows) -> list[Entry]:
    """Return the entries of the sources to train on, then of those to evaluate on (collective)."""
    return source_entries(work, (*stage.trained_on(), *stage.held_out()), stage.cache)


def _data(
    stage: ChatData | TextData,
    work: Documents | Rows,
    entries: Sequence[Entry],
    packed: bool,
    identity: Mapping[str, Any],
) -> Data:
    """Return the data in the entries of a stage's sources (collective)."""
    train, heldout = train_and_heldout(stage, entries, work.size, work.samples, work.cut)
    return Data(
        train=train,
        heldout=heldout,
        pad_id=tokenize.pad_id(work.tokenizer),
        packed=packed,
        identity={
            "weights": json.dumps([source.weight for source in stage.trained_on()]),
            "heldout_fraction": stage.heldout_fraction,
            **identity,
        },
    )


def text_data(stage: TextData, ctx: Context, model: ModelSource) -> Data:
    """Return the data of `data.text` (collective)."""
    work = Documents(stage, stage.workers, ctx, model)
    entries = _entries(stage, work)
    contents = digest([work.content(entry) for entry in entries])
    identity = {"stage": "data.text", "contents": contents, **work.identity}
    return _data(stage, work, entries, stage.documents_apart, identity)


def chat_data(stage: ChatData, ctx: Context, model: ModelSource) -> Data:
    """Return the data of `data.chat` (collective)."""
    work = Rows(stage, ctx, model)
    entries = _entries(stage, work)
    identity = {
        "stage": "data.chat",
        "contents": digest([work.content(entry) for entry in entries]),
        "packing": stage.packing,
        "tokenizer": work.tokenizer_identity,
        **({"prepend_bos": True} if any(map(work.has_start, entries)) else {}),
        **({"rows_cut_to": SHORTER} if any(entry.counts[CUT] for entry in entries) else {}),
        **work.settings,
    }
    return _data(stage, work, entries, stage.packing, identity)


class Rows:
    """Tokenises the rows of sources into cache entries, and opens them as samples."""

    def __init__(self, stage: ChatData, ctx: Context, model: ModelSource) -> None:
        """Raise StageError for a slow tokenizer."""
        self.stage, self.ctx, self.model = stage, ctx, model
        self.tokenizer = model.tokenizer()
        if not self.tokenizer.is_fast:
            raise StageError(
                f"{model.name}: its tokenizer does not report the characters of a token",
                hint="data.chat needs a tokenizer with a tokenizer.json",
            )
        identity = tokenize.tokenizer_identity(self.tokenizer)
        template = self.tokenizer.chat_template
        self.tokenizer_identity = digest([identity, template])
        ctx.dist.require_same("tokenizer", {"tokenizer": identity, "template": digest(template)})
        self.dtype = tokenize.id_dtype(self.tokenizer, model.vocab_size)
        self.start = tokenize.start_ids(self.tokenizer, stage.prepend_bos)
        """Ids that texts begin with."""
        self.settings = {name: getattr(stage, name) for name in _SETTINGS}
        if stage.turns != "together":  # as in older runs
            self.settings["turns"] = stage.turns

    def size(self, entry: Entry) -> int:
        """Return the number of an entry's samples, unpacked."""
        return entry.counts["samples"]

    def cut(self, entry: Entry, count: int) -> int:
        """Return the number of first samples nearest to `count` after which a row ends: of a
        conversation whose turns are samples, none is held out while others are trained on."""
        starts = row_starts(entry)
        if starts is None or count == self.size(entry):
            return count
        if len(starts) == 1:
            raise StageError(
                "holding out a part of one conversation leaves none to train on",
                hint="use more data or `heldout_files`",
            )
        return int(starts[1:][np.abs(starts[1:] - count).argmin()])

    def has_start(self, entry: Entry) -> bool:
        """Whether any row of an entry begins with `start`."""
        texts = {"text"} if self.stage.template else {"text", "prompt/completion", "alpaca"}
        return bool(self.start) and any(entry.counts.get(FORM + form) for form in texts)

    def content(self, entry: Entry) -> str:
        """Return what decides an entry's tokens. It is the same as in earlier versions wherever the
        tokens are: without the digest of `start` if no row begins with it, and with the numbers of
        rows that earlier versions refused, gave nulls to the template, or encoded otherwise."""
        content, start, *_ = entry.key.split(_SEPARATOR)
        more = [start] if self.has_start(entry) else []
        counts = {name: entry.counts[name] for name in (BAD, NULLS, CHANGED, *DROPPED.values())}
        more += [f"{name}:{count}" for name, count in counts.items() if count]
        return _SEPARATOR.join([content, *more])

    def told(self, counts: Counts) -> Iterator[str]:
        """Yield what a source holds, in words. Notes say why rows were dropped or changed."""
        forms = [name.removeprefix(FORM) for name in counts if counts[name] and FORM in name]
        yield f"{counted(counts['rows'], 'rows')} ({', '.join(forms)})"
        if counts["samples"] != counts["rows"]:
            yield counted(counts["samples"], "samples")
        yield counted(counts["tokens"], "tokens")
        yield f"{counts['targets']:,} trained on"
        long, most = counts["long"], self.stage.sequence_length
        if long and self.stage.too_long == "truncate":
            yield f"{counted(long, 'rows')} cut to {most} tokens"
        if counts["dropped"]:
            dropped = f"{counted(counts['dropped'], 'rows')} dropped"
            of_them = f" ({long} longer than {most} tokens)"
            yield dropped + (of_them if long and self.stage.too_long == "drop" else "")

    def key(self, opened: OpenedSource) -> str:
        settings: list[Any] = [self.settings, self.stage.roles, self.dtype]
        names = self.stage.names(opened.source)
        if names.columns or names.role_names:
            settings.append([names.columns, names.role_names])
        content = digest(["chat", KEYS, opened.digest, self.tokenizer_identity, settings])
        start = digest(self.start)[:16] if self.start else ""
        dropped: list[str] = [self.stage.bad_rows]
        dropped += [str(self.model.vocab_size)] if self.stage.bad_rows == "drop" else []
        for name, old in _TREATMENTS.items():
            value = getattr(self.stage, name)
            dropped += [f"{name}_{value}"] if value != old else []
        return _SEPARATOR.join([content, start, *dropped])

    def build(self, opened: OpenedSource, folder: Path) -> Counts:
        names = self.stage.names(opened.source)
        mistakes = Mistakes(opened.parts, self.stage.bad_rows)
        encoder = RowEncoder(
            stage=self.stage,
            names=names,
            tokens=TextTokenizer(self.tokenizer),
            vocab_size=self.model.vocab_size,
            start=self.start,
            dtype=self.dtype,
        )
        rows = rows_with_forms(opened.parts, self.stage.form, names, mistakes)
        batches = iter(lambda: list(itertools.islice(rows, _BATCH)), [])
        results = tokenize.map_batches(encoder.batch, batches, self.stage.workers)
        return write_samples(folder, results, self.dtype, self.ctx, mistakes)

    def samples(self, entry: Entry, first: int, count: int) -> Samples:
        """Open some rows of an entry as samples (collective)."""
        rows = MaskedSamples(entry, self.dtype, first, count)
        if not self.stage.packing:
            return rows
        length = self.stage.sequence_length
        packs = prepare(
            self.ctx,
            cache_folder(self.stage.cache),
            lambda: digest(["packing", KEYS, entry.key, first, count, length]),
            lambda folder: write_packs(folder, rows, length),
        )
        filled = packs.counts["positions"] / (packs.counts["samples"] * length)
        self.ctx.log.info(
            "packing: %s in %s, %.1f%% full", counted(count, "rows"),
            counted(packs.counts["samples"], "samples"), 100 * filled,
        )  # fmt: skip
        if packs.counts["samples"] == count > 1:
            self.ctx.log.warning(
                "packing joined no rows: raise `sequence_length` (%d), or leave packing out",
                length,
            )
        return PackedSamples(rows, packs)

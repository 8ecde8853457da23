"""The heavy half of `data.chat`."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.contracts.data import Data, Samples
from pipeline.contracts.model import ModelSource
from pipeline.errors import StageError
from stages.data import formats, tokenize
from stages.data.cache import KEYS, Counts, Entry, cache_folder, digest, prepare
from stages.data.chat_template import ConversationEncoder
from stages.data.encode import Encoder, RowEncoder, TextTokenizer
from stages.data.fields import split
from stages.data.samples import MaskedSamples, SampleWriter
from stages.data.sources import Opened, open_source
from stages.data.tokenize import Announcer
from stages.data.views import PackedSamples, joined, mixed, pack_key, write_packs

if TYPE_CHECKING:
    from pipeline.contracts.stage import Context
    from stages.data.chat import ChatData
    from stages.data.fields import Source

_FORM = "form "
"""Before a form's name among an entry's counts: how many rows had it."""
_START = "-"
"""Before the digest of what texts begin with, behind the rest of a cache key."""


def chat_data(stage: ChatData, ctx: Context, model: ModelSource) -> Data:
    """What the stage gives (collective)."""
    work = _Work(stage, ctx, model, _tokenizer(model))
    trained_on, held_out = stage.trained_on(), stage.held_out()
    entries = [work.entry(source) for source in trained_on]
    held_entries = [work.entry(source) for source in held_out]
    cuts = [split(entry.counts["samples"], stage.heldout_fraction) for entry in entries]
    train = [work.samples(entry, 0, cut) for entry, cut in zip(entries, cuts, strict=True)]
    held = [work.samples(entry, 0, entry.counts["samples"]) for entry in held_entries]
    if stage.heldout_fraction:
        held = [
            work.samples(entry, cut, entry.counts["samples"] - cut)
            for entry, cut in zip(entries, cuts, strict=True)
        ]
    weights = [source.weight for source in trained_on]
    return Data(
        train=mixed(train, weights),
        heldout=joined(held),
        pad_id=tokenize.pad_id(work.tokenizer),
        packed=stage.packing,
        identity={
            "stage": "data.chat",
            "tokenizer": work.tokenizer_identity,
            "contents": digest([work.content(entry) for entry in (*entries, *held_entries)]),
            "weights": json.dumps(weights),
            "heldout_fraction": stage.heldout_fraction,
            "packing": stage.packing,
            **({"prepend_bos": True} if any(map(work.begins, (*entries, *held_entries))) else {}),
            **_settings(stage),
        },
    )


def _settings(stage: ChatData) -> dict[str, Any]:
    """What decides which tokens a row becomes."""
    return {
        "form": stage.form,
        "template": stage.template,
        "today": stage.today,
        "loss": stage.loss,
        "special_tokens": stage.special_tokens,
        "sequence_length": stage.sequence_length,
        "too_long": stage.too_long,
    }


def _tokenizer(model: ModelSource) -> Any:
    tokenizer = model.tokenizer()
    if not tokenizer.is_fast:
        raise StageError(
            f"{model.name}: its tokenizer cannot tell which characters a token stands for",
            hint="data.chat needs a tokenizer with a tokenizer.json",
        )
    return tokenizer


@dataclass(frozen=True)
class _Work:
    """Makes the cache entries of sources, and samples of them."""

    stage: ChatData
    ctx: Context
    model: ModelSource
    tokenizer: Any

    @functools.cached_property
    def tokenizer_identity(self) -> str:
        return digest([tokenize.identity(self.tokenizer), self.tokenizer.chat_template])

    @functools.cached_property
    def dtype(self) -> str:
        return tokenize.id_dtype(self.tokenizer, self.model.vocab_size)

    @functools.cached_property
    def start(self) -> list[int]:
        """Ids that texts begin with."""
        return tokenize.start_ids(self.tokenizer, self.stage.prepend_bos)

    @property
    def folder(self) -> Path:
        return cache_folder(self.stage.cache)

    def entry(self, source: Source) -> Entry:
        """The tokens of all rows of a source (collective)."""
        started = time.monotonic()
        opened = functools.cache(functools.partial(open_source, source))
        entry = prepare(
            self.ctx,
            self.folder,
            lambda: self._key(opened()),
            lambda folder: self._build(opened(), folder),
        )
        tokenize.check_ids(self.model, entry.counts["largest"])
        self._report(source, entry, time.monotonic() - started)
        return entry

    def begins(self, entry: Entry) -> bool:
        """Whether any of an entry's rows begins as texts do."""
        texts = {"text"} if self.stage.template else {"text", "prompt/completion", "alpaca"}
        return bool(self.start) and any(entry.counts.get(_FORM + form) for form in texts)

    def content(self, entry: Entry) -> str:
        """The key of an entry, without what texts begin with where it has none: as it has always
        been, so that runs of conversations go on that are older than `prepend_bos`."""
        return entry.key if self.begins(entry) else entry.key.partition(_START)[0]

    def samples(self, entry: Entry, first: int, count: int) -> Samples:
        """Some rows of an entry as samples (collective)."""
        rows = MaskedSamples(entry, self.dtype, first, count)
        if not self.stage.packing:
            return rows
        length = self.stage.sequence_length
        packs = prepare(
            self.ctx,
            self.folder,
            lambda: pack_key(entry, first, count, length),
            lambda folder: write_packs(folder, rows, length),
        )
        filled = packs.counts["positions"] / (packs.counts["samples"] * length)
        self.ctx.log.info(
            "packing: %d rows in %d samples, %.1f%% full", count, packs.counts["samples"],
            100 * filled,
        )  # fmt: skip
        return PackedSamples(rows, packs)

    def _key(self, opened: Opened) -> str:
        settings = [_settings(self.stage), self.stage.roles, self.dtype]
        rest = digest(["chat", KEYS, opened.digest, self.tokenizer_identity, settings])
        return rest + _START + digest(self.start)[:16] if self.start else rest

    def _build(self, opened: Opened, folder: Path) -> Counts:
        reading = opened.reading()
        found = formats.FormFinder(form=self.stage.form)
        counts = SampleWriter(
            encoder=self._encoder(),
            dtype=self.dtype,
            workers=self.stage.workers,
            log=self.ctx.log,
            announcer=Announcer(log=self.ctx.log, reading=reading, unit="rows"),
        ).write(folder, found.rows(opened.parts, reading))
        return {**counts, **{f"{_FORM}{name}": count for name, count in found.counts.items()}}

    def _encoder(self) -> RowEncoder:
        stage, tokens = self.stage, TextTokenizer(self.tokenizer)
        return RowEncoder(
            reader=formats.Reader(
                template=stage.template, roles=stage.roles, vocab_size=self.model.vocab_size
            ),
            encode=Encoder(
                tokens,
                ConversationEncoder(tokens, stage.loss, stage.today),
                special_tokens=stage.special_tokens,
                start=self.start,
                whole=stage.loss == "all",
            ),
            sequence_length=stage.sequence_length,
            too_long=stage.too_long,
        )

    def _report(self, source: Source, entry: Entry, seconds: float) -> None:
        self.ctx.log.info(
            "%(source)s: %(rows)d rows (%(forms)s), %(dropped)d dropped, %(long)d too long, "
            "%(samples)d samples, %(tokens)d tokens, %(targets)d targets, %(seconds).1f s "
            "(%(how)s %(folder)s)",
            {
                **entry.counts,
                "source": source,
                "forms": _forms(entry.counts),
                "seconds": seconds,
                "how": "cached in" if entry.reused else "tokenised into",
                "folder": entry.folder,
            },
        )


def _forms(counts: Counts) -> str:
    """Rows by form, for people: `3 messages, 2 alpaca`."""
    found: Sequence[tuple[str, int]] = [
        (name.removeprefix(_FORM), count)
        for name, count in counts.items()
        if name.startswith(_FORM)
    ]
    return ", ".join(f"{count} {name}" for name, count in found)

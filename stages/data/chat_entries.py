"""Rows of `data.chat` tokenised into cache entries, and opened as samples."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import Context, ModelSource, StageError
from pipeline.utils import activity, counted
from stages.data import encode, samples, tokenize
from stages.data.cache import KEYS, Counts, Entry, prepare
from stages.data.fields import ChatFields
from stages.data.forms import rows_with_forms
from stages.data.mistakes import Mistake, Mistakes, Note, write_notes
from stages.data.rows import JSON, JSON_LINES, Row
from stages.data.samples import BAD, CHANGED, CountedSamples, Entries
from stages.data.sources import OpenedSource
from stages.digests import digest

Made = Sequence[encode.Encoded | encode.Dropped]
"""The samples and dropped turns that a row became."""
FORM = "form "
"""Prefix of the counts of an entry's rows by form."""
NULLS, CUT = "nulls", "cut shorter"
"""Further counts of rows: of JSON files without their nulls; and with a token more in earlier
versions."""
DROPPED = {encode.UNRENDERED: "dropped as unrendered", encode.EMPTY_ANSWER: "dropped as empty"}
"""Reasons why `data.chat` drops turns that it may train on, and the counts of the rows."""
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
"""The entry for truncated rows in the identity of data that has them."""
_SEPARATOR = "-"
"""Between the parts of a cache key: digests of the contents, and of the ids that texts begin with;
and what decides which rows are dropped, since an entry without them says nothing of them. That is
`bad_rows`, with the size of the vocabulary, which decides which `input_ids` are bad; and others of
_TREATMENTS than older runs had."""
_KEPT = (
    "they stand for keys that only other rows have; a null that is meant is kept where tools or "
    "arguments are JSON text"
)


class ChatEntries(Entries):
    """Tokenises the rows of `data.chat`."""

    def __init__(self, fields: ChatFields, ctx: Context, model: ModelSource) -> None:
        """Raise StageError for a slow tokenizer."""
        super().__init__(ctx, model, fields.cache)
        self.fields = fields
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
        self.start = tokenize.start_ids(self.tokenizer, fields.prepend_bos)
        """Ids that texts begin with."""
        self.settings = {name: getattr(fields, name) for name in _SETTINGS}
        if fields.turns != "together":  # as in older runs
            self.settings["turns"] = fields.turns

    def key(self, opened: OpenedSource) -> str:
        settings: list[Any] = [self.settings, self.fields.roles, self.dtype]
        names = self.fields.names(opened.source)
        if names.columns or names.role_names:
            settings.append([names.columns, names.role_names])
        content = digest(["chat", KEYS, opened.digest, self.tokenizer_identity, settings])
        start = digest(self.start)[:16] if self.start else ""
        bad = self.fields.bad_rows
        treatments = {name: getattr(self.fields, name) for name in _TREATMENTS}
        dropped = [bad, *([str(self.model.vocab_size)] if bad == "drop" else [])]
        dropped += [f"{k}_{value}" for k, value in treatments.items() if value != _TREATMENTS[k]]
        return _SEPARATOR.join([content, start, *dropped])

    def identity(self, entries: Sequence[Entry]) -> Mapping[str, str | int | float | None]:
        # What decides an entry's tokens is the same as in earlier versions wherever the tokens are:
        # without the digest of `start` if no row begins with it, and with the numbers of rows that
        # earlier versions refused, gave nulls to the template, or encoded otherwise.
        contents, kinds = list[str](), (BAD, NULLS, CHANGED, *DROPPED.values())
        texts = {"text"} if self.fields.template else {"text", "prompt/completion", "alpaca"}
        begun = False
        for entry in entries:
            content, start, *_ = entry.key.split(_SEPARATOR)
            begins = bool(self.start) and any(entry.counts.get(FORM + form) for form in texts)
            begun |= begins
            more = [start] if begins else []
            more += [f"{name}:{entry.counts[name]}" for name in kinds if entry.counts[name]]
            contents.append(_SEPARATOR.join([content, *more]))
        return {
            "stage": "data.chat",
            "contents": digest(contents),
            "packing": self.fields.packing,
            "tokenizer": self.tokenizer_identity,
            **({"prepend_bos": True} if begun else {}),
            **({"rows_cut_to": SHORTER} if any(entry.counts[CUT] for entry in entries) else {}),
            **self.settings,
        }

    def told(self, counts: Counts) -> Iterator[str]:
        forms = [name.removeprefix(FORM) for name in counts if counts[name] and FORM in name]
        yield f"{counted(counts['rows'], 'rows')} ({', '.join(forms)})"
        if counts["samples"] != counts["rows"]:
            yield counted(counts["samples"], "samples")
        yield counted(counts["tokens"], "tokens")
        yield f"{counts['targets']:,} trained on"
        long, most = counts["long"], self.fields.sequence_length
        if long and self.fields.too_long == "truncate":
            yield f"{counted(long, 'rows')} cut to {most} tokens"
        if counts["dropped"]:
            dropped = f"{counted(counts['dropped'], 'rows')} dropped"
            of_them = f" ({long} longer than {most} tokens)"
            yield dropped + (of_them if long and self.fields.too_long == "drop" else "")

    def build(self, opened: OpenedSource, folder: Path) -> Counts:
        """Tokenise a source, with notes on what was dropped and changed of it. Raises the error of
        its mistakes, and StageError if all is dropped."""
        names = self.fields.names(opened.source)
        mistakes = Mistakes(opened.parts, self.fields.bad_rows)
        encoder = encode.RowEncoder(
            fields=self.fields, names=names, tokens=tokenize.TextTokenizer(self.tokenizer),
            vocab_size=self.model.vocab_size, start=self.start, dtype=self.dtype,
        )  # fmt: skip
        rows = rows_with_forms(opened.parts, self.fields.form, names, mistakes)
        batches = iter(lambda: list(itertools.islice(rows, _BATCH)), [])
        results = tokenize.map_batches(encoder.batch, batches, self.fields.workers)
        counts, times, first = self._write(folder, results, mistakes)
        notes = mistakes.check(counts["rows"]) + [
            Note(text, *mistakes.place(row.file, row.number), place, _KEPT if place else "")
            for text, row, place in (
                (what.format(counted(times[what], "rows")), *seen) for what, seen in first.items()
            )
        ]
        if not counts["samples"]:
            reasons = "; ".join(note.text.removeprefix("dropped ") for note in notes)
            raise StageError(
                f"no token to train on in {counted(counts['rows'], 'rows')}: {reasons}",
                hint="check `loss`, the roles of the messages, the chat template and "
                "`sequence_length`",
            )
        write_notes(folder, notes)
        return counts

    def _write(
        self,
        folder: Path,
        batches: Iterable[tuple[Sequence[Row], Sequence[Made | Mistake]]],
        mistakes: Mistakes,
    ) -> tuple[Counts, Counter[str], dict[str, tuple[Row, str]]]:
        """Write batches of rows with their samples as the files of MaskedSamples, and the index of
        each row's first sample if a row has several; add mistakes to `mistakes`. Returns
        `rows`, `samples`, `tokens`, `targets`, `largest` (id), `long` (rows that were truncated or
        dropped), `dropped`, BAD, NULLS, CHANGED, CUT, each of DROPPED, and the rows of each form;
        the rows with each of `_changes`; and the first of these, with its place."""
        names = ["rows", "samples", "tokens", "targets", "largest", "long", "dropped"]
        counts = dict.fromkeys([*names, BAD, NULLS, CHANGED, CUT, *DROPPED.values()], 0)
        offsets, targets, starts = array("q", [0]), array("i"), array("q")
        times, first = Counter[str](), dict[str, tuple[Row, str]]()
        with (
            (folder / samples.TOKENS).open("wb") as tokens,
            (folder / samples.TRAINED).open("wb") as trained,
            activity(tokenize.TOKENISING, unit="rows") as doing,
        ):
            for rows, results in batches:
                for row, found in zip(rows, results, strict=True):
                    if isinstance(found, Mistake):
                        mistakes.add(row.error(found.message, hint=found.hint))
                        continue
                    counts["rows"] += 1
                    counts["long"] += any(each.long for each in found)
                    counts[CUT] += any(each.kept_more for each in found)
                    counts[FORM + row.form] = counts.get(FORM + row.form, 0) + 1
                    kept = [each for each in found if isinstance(each, encode.Encoded)]
                    if kept:
                        starts.append(len(targets))
                    for sample in kept:
                        tokens.write(sample.ids.tobytes())
                        trained.write(sample.trained.tobytes())
                        counts["tokens"] += len(sample.ids)
                        counts["largest"] = max(counts["largest"], int(sample.ids.max()))
                        offsets.append(counts["tokens"])
                        targets.append(int(sample.trained[1:].sum()))
                    counts["dropped"] += not kept
                    for what, place in _changes(row, found, counts):
                        times[what] += 1
                        first.setdefault(what, (row, place))
                self.ctx.dist.heartbeat.beat()
                doing.advance(len(rows))
        np.array(offsets, "<i8").tofile(folder / samples.OFFSETS)
        np.array(targets, "<i4").tofile(folder / samples.TARGETS)
        if len(starts) < len(targets):
            np.array(starts, "<i8").tofile(folder / samples.ROWS)
        counts["rows"] += mistakes.count
        counts |= {"samples": len(targets), "targets": sum(targets), BAD: mistakes.count}
        counts["dropped"] += mistakes.count
        return counts, times, first

    def samples(self, entry: Entry, first: int = 0, count: int | None = None) -> CountedSamples:
        count = entry.counts["samples"] - first if count is None else count
        rows = samples.MaskedSamples(entry, self.dtype, first, count)
        if not self.fields.packing:
            return rows
        length = self.fields.sequence_length
        packs = prepare(
            self.ctx,
            self.cache,
            lambda: digest(["packing", KEYS, entry.key, first, count, length]),
            lambda folder: rows.write_packs(folder, length),
        )
        made = packs.counts["samples"]
        filled = packs.counts["positions"] / (made * length)
        self.ctx.log.info(
            "packing: %s in %s, %.1f%% full", counted(count, "rows"), counted(made, "samples"),
            100 * filled,
        )  # fmt: skip
        if made == count > 1:
            self.ctx.log.warning(
                "packing joined no rows: raise `sequence_length` (%d), or leave packing out", length
            )
        return samples.PackedSamples(rows, packs)


def _changes(row: Row, found: Made, counts: Counts) -> Iterator[tuple[str, str]]:
    """Yield what was done with a row, which became some samples or none, with `{}` for the number
    of such rows, and a place in the row, if one matters. Counts DROPPED, CHANGED and NULLS."""
    kept = [each for each in found if isinstance(each, encode.Encoded)]
    for why in dict.fromkeys(each.why for each in found if isinstance(each, encode.Dropped)):
        yield f"dropped {'turns of ' if kept else ''}{{}} {why}", ""
        if why in DROPPED:
            counts[DROPPED[why]] += 1
    notes = dict.fromkeys(note for each in kept for note in each.notes)
    yield from ((f"{{}} {note}", "") for note in notes)
    changed = (encode.ENDED, encode.LAID_OUT, tokenize.FORMATTED)
    counts[CHANGED] += any(note in notes for note in changed)
    if kept and kept[0].nulls:
        yield "removed nulls from objects in {}", kept[0].nulls
        counts[NULLS] += str(row.file).endswith((*JSON, *JSON_LINES))

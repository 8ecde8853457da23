"""Sources are tokenised into cache entries, then mapped as samples: what all data stages do."""

from __future__ import annotations

import functools
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from pipeline import BadRows, Context, Data, DataError, ModelSource, Samples, StageError
from stages.data import tokenize
from stages.data.cache import Counts, Entry, cache_folder, prepare, prepare_locally
from stages.data.fields import Selection
from stages.data.mistakes import read_notes, together
from stages.data.samples import mixed
from stages.data.sources import OpenedSource, Source, open_source

BAD, CHANGED = "bad rows", "encoded otherwise"
"""Counts of an entry: rows with a mistake, which were dropped; rows or documents that earlier
versions encoded otherwise."""


class Entries(ABC):
    """Tokenises sources into cache entries, and opens them as samples."""

    def __init__(self, ctx: Context, model: ModelSource) -> None:
        self.ctx, self.model, self.tokenizer = ctx, model, model.tokenizer()

    @abstractmethod
    def key(self, opened: OpenedSource) -> str:
        """Return the cache key of a source."""

    @abstractmethod
    def build(self, opened: OpenedSource, folder: Path) -> Counts:
        """Tokenise a source into a folder. Raises the error of its mistakes."""

    @abstractmethod
    def told(self, counts: Counts) -> Iterator[str]:
        """Yield what a source holds, in words. Notes say why rows were dropped or changed."""

    @abstractmethod
    def identity(self, entries: Sequence[Entry]) -> Mapping[str, str | int | float | None]:
        """Return everything that decides the samples of entries, but weights and held-out parts."""

    @abstractmethod
    def size(self, entry: Entry) -> int:
        """Return the number of an entry's samples, unpacked."""

    @abstractmethod
    def samples(self, entry: Entry, first: int, count: int) -> Samples:
        """Open some samples of an entry (collective)."""

    def cut(self, entry: Entry, count: int) -> int:
        """Return the number of first samples, near `count`, that may be parted from the rest."""
        return count

    def open(self, sources: Sequence[Source], cache: str | None) -> list[Entry]:
        """Return the cache entries of sources, tokenised if they are absent (collective). Raises
        the DataError or BadRows of all sources together."""
        opened = [functools.cache(functools.partial(open_source, source)) for source in sources]
        folder, errors = cache_folder(cache), list[DataError | BadRows]()
        if len(sources) > 1:  # all, whatever is wrong with others
            with self.ctx.dist.rank0_first() as main:
                for each in opened if main else ():
                    try:
                        build = functools.partial(self.build, each())
                        prepare_locally(folder, self.key(each()), build)
                    except (DataError, BadRows) as error:
                        errors.append(error)
                if errors:
                    raise together(errors)
        return [self._entry(*each, folder) for each in zip(sources, opened, strict=True)]

    def _entry(self, source: Source, opened: Callable[[], OpenedSource], folder: Path) -> Entry:
        started = time.monotonic()
        entry = prepare(
            self.ctx,
            folder,
            lambda: self.key(opened()),
            lambda partial: self.build(opened(), partial),
        )
        largest, log = entry.counts["largest"], self.ctx.log
        tokenize.check_ids(self.model, largest)
        seconds = time.monotonic() - started
        log.info("%s: %s, %.1f s", source, ", ".join(self.told(entry.counts)), seconds)
        log.debug("%s: largest id %d, in %s", source, largest, entry.folder)
        if self.ctx.dist.is_main:  # which has opened the source
            for note in read_notes(entry):
                log.warning("%s", note.told([part.name for part in opened().parts]))
        return entry

    def data(self, fields: Selection, *, packed: bool) -> Data:
        """Return the samples of a stage's sources (collective)."""
        sources, fraction = fields.trained_on(), fields.heldout_fraction
        entries = self.open((*sources, *fields.held_out()), fields.cache)
        trained = entries[: len(sources)]
        cuts = [self.cut(each, _train_count(self.size(each), fraction)) for each in trained]
        train = [self.samples(entry, 0, cut) for entry, cut in zip(trained, cuts, strict=True)]
        rest = list(zip(trained, cuts, strict=True))
        rest = rest if fraction else [(entry, 0) for entry in entries[len(sources) :]]
        held = [self.samples(entry, first, self.size(entry) - first) for entry, first in rest]
        weights = [source.weight for source in sources]
        return Data(
            train=mixed(train, weights),
            heldout=mixed(held) if held else None,
            pad_id=tokenize.pad_id(self.tokenizer),
            packed=packed,
            identity={
                "weights": json.dumps(weights),
                "heldout_fraction": fraction,
                **self.identity(entries),
            },
        )


def _train_count(count: int, fraction: float) -> int:
    """Return how many of `count` samples are left if the last `fraction`, at least one sample for a
    fraction above 0, is held out."""
    held = max(1, round(count * fraction)) if fraction > 0 else 0
    if held >= count:
        raise StageError(
            f"holding out {fraction:g} of {count} samples leaves none to train on",
            hint="use more data, shorter samples or `heldout_files`",
        )
    return count - held

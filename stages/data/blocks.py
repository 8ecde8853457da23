"""One stream of tokens, cut into fixed-length samples."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.artifacts import Sample, Samples
from stages.data.cache import Counts

if TYPE_CHECKING:
    import logging

TOKENS = "tokens.bin"
_LARGEST_CALL = 4_000_000
_LOG_SECONDS = 10.0


class TokenBlocks(Samples):
    """Windows of `length` + 1 tokens with stride `length`: every token but the first is one target.

    The last window is shorter when the stream does not fill it. `first` and `count` select a
    contiguous part of the windows.
    """

    def __init__(
        self, tokens: np.ndarray[Any, Any], length: int, first: int = 0, count: int | None = None
    ) -> None:
        self.tokens = tokens
        self._length = length
        self._first = first
        self._count = windows(len(tokens), length) - first if count is None else count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sample:
        start, stop = self._bounds(index)
        window = np.asarray(self.tokens[start:stop], dtype=np.int64)
        return Sample(input_ids=window[:-1], labels=window[1:])

    def targets(self, index: int) -> int:
        start, stop = self._bounds(index)
        return stop - start - 1

    def _bounds(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self._count:
            raise IndexError(f"sample {index} of {self._count}")
        start = (self._first + index) * self._length
        return start, min(start + self._length + 1, len(self.tokens))


def windows(tokens: int, length: int) -> int:
    """How many samples with at least one target a stream of `tokens` tokens gives."""
    return max(0, -(-(tokens - 1) // length))


@dataclass(frozen=True, kw_only=True)
class TokenWriter:
    """Tokenises documents into one flat file, in memory bounded by the longest document."""

    tokenizer: Any
    dtype: str
    prefix: list[int]
    """Ids before each document."""
    suffix: list[int]
    """Ids behind each document."""
    batch_documents: int
    log: logging.Logger

    def write(self, folder: Path, documents: Iterable[str]) -> Counts:
        """Write `tokens.bin` and return `documents`, `tokens` and `largest` (id)."""
        counts = {"documents": 0, "tokens": 0, "largest": 0}
        spoken = time.monotonic()
        with (folder / TOKENS).open("wb") as file:
            for batch in batches(documents, self.batch_documents):
                ids = self._ids(batch)
                ids.tofile(file)
                counts["documents"] += len(batch)
                counts["tokens"] += len(ids)
                counts["largest"] = max(counts["largest"], int(ids.max(initial=0)))
                if time.monotonic() - spoken > _LOG_SECONDS:
                    spoken = time.monotonic()
                    self.log.info("tokenising: %(documents)d documents, %(tokens)d tokens", counts)
        return counts

    def _ids(self, batch: list[str]) -> np.ndarray[Any, Any]:
        encoded = self.tokenizer(
            batch,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # no warning that a document is longer than the model's context
        )
        parts = [np.array([*self.prefix, *ids, *self.suffix]) for ids in encoded["input_ids"]]
        return np.concatenate(parts).astype(self.dtype)


def batches(documents: Iterable[str], size: int) -> Iterator[list[str]]:
    """Documents in lists of at most `size`, and of a few million characters if none has more."""
    batch: list[str] = []
    characters = 0
    for document in documents:
        if batch and (len(batch) == size or characters + len(document) > _LARGEST_CALL):
            yield batch
            batch, characters = [], 0
        batch.append(document)
        characters += len(document)
    if batch:
        yield batch

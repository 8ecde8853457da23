"""Ids of texts, and the characters of each token."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stages.data.token_sizes import Span, TextTokens, TokenSizes, token_sizes
from stages.data.tokenizer_compat import backend


def plain_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Return the ids of each text, without special tokens that it does not spell."""
    fast = backend(tokenizer)
    if fast is not None:  # which need not find the characters of the tokens
        return [each.ids for each in fast.encode_batch_fast(texts, add_special_tokens=False)]
    encoded = tokenizer(
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # no warning that a text is longer than the model's context
    )
    return list(encoded["input_ids"])


@dataclass(frozen=True)
class TextTokenizer:
    """A fast tokenizer that reports the characters of each token."""

    tokenizer: Any

    def __call__(self, texts: list[str]) -> list[TextTokens]:
        """Tokenise texts that contain their special tokens already."""
        found: list[TextTokens | None] = [None] * len(texts)
        if self._sizes is not None:
            ids = (np.array(each, np.int64) for each in plain_ids(self.tokenizer, texts))
            found = list(map(self._sizes.tokens, texts, ids))
        left = [text for text, one in zip(texts, found, strict=True) if not one]
        rest = iter(self._reported(left))
        return [one or next(rest) for one in found]

    def _reported(self, texts: list[str]) -> list[TextTokens]:
        """Return the tokens of each text with the characters that the tokenizer reports."""
        fast = backend(self.tokenizer)
        if fast is not None:
            found = fast.encode_batch(texts, add_special_tokens=False)
            return [_bounded(each.ids, each.offsets) for each in found]
        called = functools.partial(
            self.tokenizer, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return [_bounded(each["input_ids"], each["offset_mapping"]) for each in map(called, texts)]

    @functools.cached_property
    def _sizes(self) -> TokenSizes | None:
        return token_sizes(self.tokenizer)

    @functools.cached_property
    def special(self) -> Mapping[int, str]:
        """Text of each special token by id."""
        known = self.tokenizer.added_tokens_decoder
        return {index: str(token) for index, token in known.items() if token.special}

    def are_special(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of some ids are special tokens; shape (length,)."""
        return self._is_special[np.minimum(ids, len(self._is_special) - 1)]

    @functools.cached_property
    def _is_special(self) -> NDArray[np.bool_]:
        """Whether each id is special; the last stands for all that are larger."""
        table = np.zeros(max(self.special, default=-1) + 2, bool)
        table[list(self.special)] = True
        return table

    @functools.cached_property
    def spelled(self) -> re.Pattern[str]:
        """Matches the text of any special token."""
        texts = sorted(self.special.values(), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or "(?!)")  # which never matches

    def spelled_in(self, value: Any) -> str | None:
        """Return a special token that a text within `value` spells out, if any does."""
        found = map(self.spelled.search, _texts(value))
        return next((match.group() for match in found if match), None)


def _bounded(ids: list[int], reported: list[Span]) -> TextTokens:
    flat = np.fromiter(itertools.chain.from_iterable(reported), np.int64, 2 * len(reported))
    offsets = flat.reshape(-1, 2)
    # Some tokenizers leave white space out of the offsets; it belongs to the token behind it.
    reached = np.maximum.accumulate(offsets[:, 1])
    before = np.concatenate([[0], reached[:-1]])
    bounds = np.stack([np.minimum(offsets[:, 0], before), offsets[:, 1]], axis=1)
    return TextTokens(np.array(ids, dtype=np.int64), bounds)


def _texts(value: Any) -> Iterator[str]:
    """Texts within a value, in order."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            left += reversed(value.values())
        elif isinstance(value, list):
            left += reversed(value)

"""Ids of texts, and the characters of each token."""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import models

from stages.data.tokenizer_compat import backend, steps_of

Span = tuple[int, int]
"""Start and end of a range of characters."""

Form = Literal["NFC", "NFD"]


@dataclass(frozen=True)
class TextTokens:
    """A text's ids (int64, shape (length,)), and the start and end of the characters of each token
    (int64, shape (length, 2))."""

    ids: NDArray[np.int64]
    bounds: NDArray[np.int64]

    def inside(self, spans: list[Span]) -> NDArray[np.bool_]:
        """Return which tokens share a character with one of the spans; shape (length,)."""
        inside = np.zeros(len(self.bounds), dtype=bool)
        for start, end in spans:
            inside |= (self.bounds[:, 0] < end) & (self.bounds[:, 1] > start)
        return inside


@dataclass(frozen=True, eq=False)
class TokenSizes:
    """Sizes of a tokenizer's tokens, which spell every byte of a text in order."""

    sizes: NDArray[np.int64]
    """Bytes of each id; `_UNKNOWN` for ids that the tokenizer does not have."""
    form: Form | None
    """Form of Unicode that the tokenizer brings texts to."""

    def tokens(self, text: str, ids: NDArray[np.int64]) -> TextTokens | None:
        """Return a text's tokens, as the tokenizer reports them; None if it changes this text,
        leaves out a part of it, or makes a token of unknown size of it."""
        if self.form and not unicodedata.is_normalized(self.form, text):
            return None
        sizes = self.sizes[ids]
        ends = np.cumsum(sizes)
        starts = ends - sizes
        raw = text.encode()
        if (ends[-1] if len(ids) else 0) != len(raw):
            return None
        if len(raw) == len(text):
            return TextTokens(ids, np.stack([starts, ends], axis=1))
        begins = (np.frombuffer(raw, np.uint8) & 0xC0) != 0x80  # the other bytes continue one
        character = np.cumsum(begins) - 1
        return TextTokens(ids, np.stack([character[starts], character[ends - 1] + 1], axis=1))


_UNKNOWN = 1 << 40
"""More bytes than a text has."""


def token_sizes(tokenizer: Any) -> TokenSizes | None:
    """Return the sizes of the tokens of byte-level BPE; None for other tokenizers."""
    fast = backend(tokenizer)
    if fast is None or not _spells_every_byte(fast):
        return None
    forms: list[Any] = [step["type"] for step in steps_of(fast.normalizer)]
    if forms not in ([], ["NFC"], ["NFD"]):
        return None
    added = tokenizer.added_tokens_decoder
    if any(token.lstrip or token.rstrip for token in added.values()):
        return None  # they stand for spaces around them, too
    if forms and not all(token.content.isascii() for token in added.values()):
        return None  # they may be found in another form
    if not all(map(_keeps_offsets, steps_of(fast.post_processor))):
        return None
    vocabulary = tokenizer.get_vocab()
    sizes = np.full(max([*vocabulary.values(), *added]) + 1, _UNKNOWN, np.int64)
    sizes[list(vocabulary.values())] = list(map(len, vocabulary))  # a character stands for a byte
    for index, token in added.items():
        sizes[index] = len(token.content.encode())
    return TokenSizes(sizes, forms[0] if forms else None)


def _keeps_offsets(step: Mapping[str, Any]) -> bool:
    """Whether a step behind the model leaves the characters of tokens alone."""
    trims = step.get("trim_offsets", False)
    return step["type"] == "TemplateProcessing" or (step["type"] == "ByteLevel" and not trims)


def _spells_every_byte(fast: Any) -> bool:
    """Whether the tokens of a text spell its bytes in order, if it leaves out none."""
    model, steps = fast.model, list(steps_of(fast.pre_tokenizer))
    byte_level = [step for step in steps if step["type"] == "ByteLevel"]
    return (
        isinstance(model, models.BPE)
        and not (model.unk_token or model.byte_fallback)
        and not (model.continuing_subword_prefix or model.end_of_word_suffix)
        and {step["type"] for step in steps} <= {"ByteLevel", "Digits", "Split"}
        and len(byte_level) == 1
        and not byte_level[0]["add_prefix_space"]
    )


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

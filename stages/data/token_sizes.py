"""The characters of each token, from the number of bytes that each token stands for."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
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

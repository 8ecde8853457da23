"""The characters of each token, from the number of bytes that each token stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import models

from stages.data.tokenizer_compat import backend, steps_of

Span = tuple[int, int]
"""Start and end of a range of characters."""


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
    """Bytes of each id; `_UNKNOWN` where they would not tell."""

    def tokens(self, text: str, ids: NDArray[np.int64]) -> TextTokens | None:
        """Return a text's tokens, as the tokenizer reports them; None if it leaves out a part of
        this text, or makes a token of unknown size of it."""
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
_SPACE = "\u0120"
"""Character that stands for a space in the tokens of byte-level BPE."""


def token_sizes(tokenizer: Any) -> TokenSizes | None:
    """Return the sizes of the tokens of byte-level BPE that changes no character of a text; None
    for other tokenizers."""
    fast = backend(tokenizer)
    if fast is None or not _spells_every_byte(fast):
        return None
    added = tokenizer.added_tokens_decoder
    if any(token.lstrip or token.rstrip for token in added.values()):
        return None  # they stand for spaces around them, too
    processors = list(steps_of(fast.post_processor))
    if any(step["type"] not in ("ByteLevel", "TemplateProcessing") for step in processors):
        return None
    trimmed = any(step.get("trim_offsets") for step in processors)
    vocabulary = {index: token for token, index in tokenizer.get_vocab().items()}
    sizes = np.full(max([*vocabulary, *added]) + 1, _UNKNOWN, np.int64)
    for index, token in vocabulary.items():
        sizes[index] = _size(len(token), token, token.rstrip(_SPACE), trimmed)
    for index, special in added.items():
        content = special.content
        sizes[index] = _size(len(content.encode()), content, content.rstrip(), trimmed)
    return TokenSizes(sizes)


def _size(size: int, token: str, without_spaces: str, trimmed: bool) -> int:
    """Return a token's size, unless the tokenizer reports it without spaces at its end. A token of
    nothing but spaces is reported with its end, and with white space left out before it."""
    return _UNKNOWN if trimmed and "" != without_spaces != token else size


def _spells_every_byte(fast: Any) -> bool:
    """Whether the tokens of a text spell its bytes in order, if it leaves out none."""
    model, steps = fast.model, list(steps_of(fast.pre_tokenizer))
    byte_level = [step for step in steps if step["type"] == "ByteLevel"]
    return (
        fast.normalizer is None
        and isinstance(model, models.BPE)
        and not (model.unk_token or model.byte_fallback)
        and not (model.continuing_subword_prefix or model.end_of_word_suffix)
        and {step["type"] for step in steps} <= {"ByteLevel", "Digits", "Split"}
        and len(byte_level) == 1
        and not byte_level[0]["add_prefix_space"]
    )

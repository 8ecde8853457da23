"""Long documents cut where their tokens do not depend on what is behind the cut.

Most tokenizers split a text by a regular expression, and make tokens of each part on its own. Where
all expressions must split, whatever surrounds the place, the tokens of the two sides are those of
the whole. So one document can be tokenised by several processes, in little memory.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tokenizers import models

from stages.data.tokenizer_compat import backend, steps_of

PIECE = 4096
"""Characters of a piece at least. Calls for much longer texts take longer for each of them."""

_CUT = re.compile(r"""(?<=\w)(?=[ ]\w)|(?<=[\w.,;:!?…)\]"'”’»。！？」]\n)(?=\w)""")
"""Places to cut at: before a single space between words, and behind a line of the text when the
next one begins with a word."""
_ACROSS = re.compile(r"\w |\n\w")
"""A place within every text that reaches across such a cut."""

_LETTERS = (r"\p{L}", r"[\p{L}\p{M}]")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDINGS = ("'s|'t|'re|'ve|'m|'ll|'d", "(?i:'s|'t|'re|'ve|'m|'ll|'d)")
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_SYMBOLS = (r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{M}\p{N}]+")
_SPACES = r"\s+"
_SAFE = frozenset({
    *_ENDINGS[0].split("|"), _ENDINGS[1],
    *(f" ?{letters}+" for letters in _LETTERS), *(f"{_BEFORE}{letters}+" for letters in _LETTERS),
    *(f"{_BEFORE}{_UPPER}*{_LOWER}+{end}" for end in ("", f"{_ENDINGS[1]}?")),
    *(f"{_BEFORE}{_UPPER}+{_LOWER}*{end}" for end in ("", f"{_ENDINGS[1]}?")),
    r" ?\p{N}+", r"\p{N}", r"\p{N}+", r"\p{N}{1,3}",
    *(symbols + end for symbols in _SYMBOLS for end in ("", r"[\r\n]*", r"[\r\n/]*")),
    r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", _SPACES,
})  # fmt: skip
"""Alternatives of the expressions of GPT-2, Llama 3, Qwen, GPT-4o and their like. None matches
across a cut or looks behind, and none but white space looks ahead."""


def cutter(tokenizer: Any) -> Callable[[str], list[str]]:
    """Return a function that cuts a text into pieces whose tokens, one behind the other, are those
    of the text; a single one for a tokenizer that is not known to allow it."""
    return _pieces if _splits(tokenizer) else lambda text: [text]


def _pieces(text: str) -> list[str]:
    pieces, start = list[str](), 0
    while found := _CUT.search(text, start + PIECE):
        pieces.append(text[start : found.start()])
        start = found.start()
    return [*pieces, text[start:]]


def _splits(tokenizer: Any) -> bool:
    """Whether a tokenizer is sure to split texts wherever `_CUT` matches."""
    fast = backend(tokenizer)
    if fast is None or not isinstance(fast.model, models.BPE) or fast.model.dropout:
        return False
    added = tokenizer.added_tokens_decoder.values()
    if any(
        token.lstrip or token.rstrip or token.single_word or _reaches_across(token.content)
        for token in added
    ):
        return False
    if any(step["type"] not in ("NFC", "NFD") for step in steps_of(fast.normalizer)):
        return False  # those combine nothing with a space, a line's end, or a letter behind one
    every = steps_of(fast.pre_tokenizer)
    steps = [step for step in every if step["type"] != "Digits"]  # which looks at one character
    return bool(steps) and _splits_words(steps[0]) and all(map(_is_local, steps[1:]))


def _reaches_across(text: str) -> bool:
    """Whether a text, in any form that a normalizer may give it, could be cut in two."""
    forms = (text, unicodedata.normalize("NFC", text), unicodedata.normalize("NFD", text))
    return any(map(_ACROSS.search, forms))


def _is_local(step: Mapping[str, Any]) -> bool:
    """Whether a step does the same to every part of a text that has been split before."""
    return _splits_words(step) or (step["type"] == "ByteLevel" and not step["add_prefix_space"])


def _splits_words(step: Mapping[str, Any]) -> bool:
    """Whether a step splits wherever `_CUT` matches."""
    if step["type"] == "ByteLevel":  # its expression is GPT-2's
        return bool(step["use_regex"] and not step["add_prefix_space"])
    if step["type"] != "Split":
        return False
    if (step["behavior"], step["invert"]) not in (("Isolated", False), ("Removed", True)):
        return False
    alternatives = set(_alternatives(step["pattern"].get("Regex", "")))
    return alternatives <= _SAFE and _SPACES in alternatives


def _alternatives(expression: str) -> Iterator[str]:
    """Yield what stands between the outermost `|` of a regular expression."""
    depth, start = 0, 0
    for place, character in enumerate(expression):
        depth += (character in "([") - (character in ")]")
        if character == "|" and depth == 0:
            yield expression[start:place]
            start = place + 1
    yield expression[start:]

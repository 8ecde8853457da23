"""Facts about a tokenizer of transformers from the library below it: whether its ids are that
library's, how many bytes each token spells, and where a text can be cut.

Most tokenizers split a text by a regular expression, and make tokens of each part independently.
Where all expressions must split, whatever surrounds the place, the tokens of the two sides are
the tokens of the whole. So one document can be tokenised by several processes, in little memory.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import models

PIECE = 4096
"""Characters of a piece at least. Calls for much longer texts take longer for each of them."""
_CUT = re.compile(r"""(?<=\w)(?=[ ]\w)|(?<=[\w.,;:!?…)\]"'”’»。！？」]\n)(?=\w)""")
"""Places to cut at: before a single space between words, and after a line of the text when the next
one begins with a word."""
_ACROSS = re.compile(r"\w |\n\w")
"""A place within every text that reaches across such a cut."""
_UNKNOWN = 1 << 40
"""More bytes than a text has."""

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
"""Alternatives of the expressions of GPT-2, Llama 3, Qwen, GPT-4o and similar. None matches across
a cut or looks back, and none but white space looks ahead."""


def backend(tokenizer: Any) -> Any | None:
    """Return the `tokenizers.Tokenizer` that makes the same ids of a text as a tokenizer's own call
    without special tokens, set up as that call does; None if the call is a subclass's own."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    if (
        not isinstance(tokenizer, PreTrainedTokenizerFast)
        or kind.__call__ is not PreTrainedTokenizerBase.__call__
        or kind._encode_plus is not PreTrainedTokenizerFast._encode_plus
        or hasattr(tokenizer, "_switch_to_input_mode")
    ):
        return None
    found: Any = tokenizer.backend_tokenizer
    if found.truncation is not None:
        found.no_truncation()
    if found.padding is not None:
        found.no_padding()
    if found.encode_special_tokens != tokenizer.split_special_tokens:
        found.encode_special_tokens = tokenizer.split_special_tokens
    return found


def _steps(part: Any) -> list[Mapping[str, Any]]:
    """Return the settings of each step of a part, which may be a sequence or None."""
    steps = list[Mapping[str, Any]]()
    left = [] if part is None else [json.loads(part.__getstate__())]
    while left:
        state = left.pop()
        steps += [state] if state["type"] != "Sequence" else []
        for name in ("normalizers", "pretokenizers", "processors"):
            left += reversed(state.get(name, ()))
    return steps


def token_sizes(tokenizer: Any) -> tuple[NDArray[np.int64], str] | None:
    """Return the bytes that each id spells, shape (ids,), and the form of Unicode (NFC or NFD) that
    the tokenizer brings texts to, if any; None unless its tokens come from byte-level BPE, which
    spell every byte of a text in order."""
    fast, added = backend(tokenizer), tokenizer.added_tokens_decoder
    if fast is None or any(token.lstrip or token.rstrip for token in added.values()):
        return None  # such tokens stand for spaces around them, too
    model, steps = fast.model, _steps(fast.pre_tokenizer)
    forms = [step["type"] for step in _steps(fast.normalizer)]
    byte_level = [step for step in steps if step["type"] == "ByteLevel"]
    if not (
        isinstance(model, models.BPE)
        and not (model.unk_token or model.byte_fallback)
        and not (model.continuing_subword_prefix or model.end_of_word_suffix)
        and {step["type"] for step in steps} <= {"ByteLevel", "Digits", "Split"}
        and [step["add_prefix_space"] for step in byte_level] == [False]
        and forms in ([], ["NFC"], ["NFD"])
    ):
        return None
    if forms and not all(token.content.isascii() for token in added.values()):
        return None  # they may be found in another form
    for step in _steps(fast.post_processor):
        trims = step["type"] == "ByteLevel" and step.get("trim_offsets", False)
        if trims or step["type"] not in ("TemplateProcessing", "ByteLevel"):
            return None  # it changes the characters of tokens
    vocabulary = tokenizer.get_vocab()
    sizes = np.full(max([*vocabulary.values(), *added]) + 1, _UNKNOWN, np.int64)
    sizes[list(vocabulary.values())] = list(map(len, vocabulary))  # a character stands for a byte
    for index, token in added.items():
        sizes[index] = len(token.content.encode())
    return sizes, forms[0] if forms else ""


def cutter(tokenizer: Any) -> Callable[[str], list[str]]:
    """Return a function that cuts texts where their tokens allow it, possibly nowhere."""

    def pieces(text: str) -> list[str]:
        found, start = list[str](), 0
        while cut := _CUT.search(text, start + PIECE):
            found.append(text[start : cut.start()])
            start = cut.start()
        return [*found, text[start:]]

    return pieces if _splits(tokenizer) else lambda text: [text]


def _splits(tokenizer: Any) -> bool:
    """Whether a tokenizer is sure to split texts wherever `_CUT` matches."""
    fast = backend(tokenizer)
    if fast is None or not isinstance(fast.model, models.BPE) or fast.model.dropout:
        return False
    for token in tokenizer.added_tokens_decoder.values():
        forms = [token.content, *(unicodedata.normalize(f, token.content) for f in ("NFC", "NFD"))]
        if token.lstrip or token.rstrip or token.single_word or any(map(_ACROSS.search, forms)):
            return False
    if any(step["type"] not in ("NFC", "NFD") for step in _steps(fast.normalizer)):
        return False  # those combine nothing with a space, a line's end, or a letter after one
    every = _steps(fast.pre_tokenizer)
    steps = [step for step in every if step["type"] != "Digits"]  # which looks at one character
    # After the first has split, each has to do the same to every part.
    return (
        bool(steps)
        and _splits_words(steps[0])
        and all(
            _splits_words(step) or (step["type"] == "ByteLevel" and not step["add_prefix_space"])
            for step in steps[1:]
        )
    )


def _splits_words(step: Mapping[str, Any]) -> bool:
    """Whether a step splits wherever `_CUT` matches."""
    if step["type"] == "ByteLevel":  # its expression is GPT-2's
        return bool(step["use_regex"] and not step["add_prefix_space"])
    if step["type"] != "Split":
        return False
    if (step["behavior"], step["invert"]) not in (("Isolated", False), ("Removed", True)):
        return False
    alternatives, depth = [""], 0
    for character in step["pattern"].get("Regex", ""):
        depth += (character in "([") - (character in ")]")
        if character == "|" and depth == 0:
            alternatives.append("")
        else:
            alternatives[-1] += character
    return {*alternatives} <= _SAFE and _SPACES in alternatives

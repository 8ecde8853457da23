"""Tokenizers of transformers that do no more than call the library below them, and its parts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


def backend(tokenizer: Any) -> Any | None:
    """Return the `tokenizers.Tokenizer` that gives the same ids for a text as a tokenizer's own
    call without special tokens, set up as that call does; None if the call is a subclass's own."""
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


def steps_of(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of each step of a part of the library's tokenizer, such as its
    normalizer, which may be a sequence; none of None."""
    yield from () if part is None else _flat(json.loads(part.__getstate__()))


def _flat(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if state["type"] != "Sequence":
        yield state
        return
    for name in ("normalizers", "pretokenizers", "processors"):
        for child in state.get(name, ()):
            yield from _flat(child)

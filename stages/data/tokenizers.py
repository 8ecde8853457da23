"""What both data stages ask of a tokenizer."""

from __future__ import annotations

import json
from typing import Any

from pipeline.artifacts import ModelSource
from pipeline.errors import StageError
from stages.data.cache import digest


def identity(tokenizer: Any) -> str:
    """Hex digest of everything that decides which ids a text becomes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        state: Any = sorted(tokenizer.get_vocab().items())
    else:
        state = json.loads(backend.to_str())
        # Left over from the last call, not part of what the tokenizer is.
        state.pop("truncation", None)
        state.pop("padding", None)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return digest([type(tokenizer).__name__, state, special])


def id_dtype(tokenizer: Any, vocab_size: int = 0) -> str:
    """The little-endian dtype that holds every id of the tokenizer, and those below `vocab_size`
    that rows of ids may have."""
    largest = max(max(tokenizer.get_vocab().values()), vocab_size - 1)
    return "<u2" if largest < 1 << 16 else "<u4"


def pad_id(tokenizer: Any) -> int:
    """The padding token's id, else the end token's, else 0."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


def required_id(tokenizer: Any, name: str, field: str) -> int:
    """The id of `bos_token` or `eos_token`, which `field` asks for; StageError if there is none."""
    token = getattr(tokenizer, f"{name}_id")
    if token is None:
        raise StageError(f"the tokenizer has no {name}", hint=f"set `{field}: false`")
    return int(token)


def start_ids(tokenizer: Any, prepend_bos: bool | None) -> list[int]:
    """Ids that a text begins with: the start token or none, as the field says; null: those that the
    tokenizer's own call puts before a text. Raises StageError when there is no start token, or when
    it cannot be told from the call."""
    if prepend_bos is not None:
        return [required_id(tokenizer, "bos_token", "prepend_bos")] if prepend_bos else []
    for text in ("a", "A", "1", "."):  # which of them a tokenizer has ids for is not known
        called = list(tokenizer(text)["input_ids"])
        plain = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        places = range(len(called) - len(plain) + 1)
        start = next((k for k in places if called[k : k + len(plain)] == plain), None)
        if start is not None and (plain or not called):
            return called[:start]
    raise StageError(
        "what the tokenizer puts before a text cannot be told", hint="set `prepend_bos`"
    )


def check_ids(model: ModelSource, largest: int) -> None:
    """Raise StageError when the data holds an id beyond the model's embedding."""
    if largest >= model.vocab_size:
        raise StageError(
            f"the tokenizer made id {largest}, but {model.name} embeds {model.vocab_size} tokens",
            hint="this tokenizer belongs to another model",
        )

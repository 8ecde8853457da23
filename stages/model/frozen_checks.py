"""Mistakes in the field `frozen` of a `model.hf` slot, and the weights that are drawn at random.
Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import Problem, StageError
from stages.model.compat import is_multimodal
from stages.model.declared import matches
from stages.model.files import largest_id
from stages.model.read import config_at_hand
from stages.model.source_text_compat import tied_names, ties_by_default

if TYPE_CHECKING:
    from stages.model.hf import HfModel


def frozen_problems(stage: HfModel) -> Iterator[Problem]:
    """Yield patterns that match everything or nothing, and those that freeze weights which are
    drawn at random and which the data train on."""
    for pattern in stage.frozen:
        if not pattern.strip("*"):
            message = "matches all parameters" if pattern else "matches no parameter"
            hint = "write patterns of names, as in ['model.embed_tokens.*', 'model.layers.0.*']"
            yield Problem(key="frozen", message=f"{pattern!r} {message}", hint=hint)
    random = [(new, f"{new}, which new_weights draws at random") for new in stage.new_weights]
    try:
        if rows := new_rows(stage) if stage.frozen else 0:
            what = f"{rows} rows of {{}}, which are new and random and which the tokenizer uses"
            random += [(name, what.format(name)) for name in tables(stage).values()]
    except StageError as error:  # of the tokenizer's files
        yield Problem(message=str(error))
    for name, what in random:
        if matches(name, stage.frozen):
            hint = f"leave {name} out of frozen"
            yield Problem(key="frozen", message=f"{what}, would stay as they are", hint=hint)


def tables(model: HfModel) -> dict[str, str]:
    """The tables of a model with a row for each token -> their names, empty where the source of its
    type does not say them. Tied ones are one."""
    config = config_at_hand(model) or {}
    kind, text = str(config.get("model_type")), config.get("text_config") or {}
    other_class = model.trust_remote_code or is_multimodal(config)
    head, embedding = (None if other_class else tied_names(kind)) or ("", "")
    stated = (part.get("tie_word_embeddings") for part in (config, text))
    tied = next((each for each in stated if each is not None), ties_by_default(kind))
    return {"embedding": embedding} | ({} if tied else {"head": head})


def new_rows(model: HfModel) -> int:
    """Rows that the slot's `vocab_size` adds and that the tokenizer, if its files are here, has
    tokens for. Raises StageError for files of it that are damaged."""
    config = config_at_hand(dataclasses.replace(model, vocab_size=None)) or {}
    config = config.get("text_config") or config
    known = config.get("vocab_size")
    if model.vocab_size is None or not isinstance(known, int) or model.init == "random":
        return 0
    place = model.tokenizer or model.path
    largest = largest_id(Path(place).expanduser()) if place else None
    used = model.vocab_size if largest is None else min(model.vocab_size, largest + 1)
    return max(0, used - known)

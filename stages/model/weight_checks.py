"""Mistakes about weights that show in the headers of local files before anything starts: a head
that is missing or is not the embedding that it should be, and random weights that stay frozen.
Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from pipeline import Problem, StageError
from pipeline.checkpoint import Placed, table
from pipeline.utils import expanded
from stages.model.compat import is_multimodal, tied_names, ties_by_default
from stages.model.config_checks import of_text
from stages.model.declared import matches
from stages.model.files import (
    is_gguf,
    is_local,
    largest_id,
    safetensors_files,
)
from stages.model.settings import HfSettings

SAMPLE = 1 << 20
"""Bytes of a sample of a matrix."""
LONGEST_HEADER = 100_000_000
"""Bytes, a limit of the format."""


class Stored(NamedTuple):
    """A tensor in a file."""

    file: Path
    name: str
    placed: Placed
    start: int
    """Byte of the file at which its values begin."""


def head_problems(stage: HfSettings) -> Iterator[Problem]:
    """Yield the problem of a model whose head its files do not have, or have as a second matrix
    though it shares the embedding's. What cannot be read here, loading reports."""
    path, elsewhere = stage.path, stage.init == "random" or stage.gguf_file is not None
    if path is None or elsewhere or stage.trust_remote_code or not is_local(path) or is_gguf(path):
        return
    config = stage.config_at_hand()
    if config is None or is_multimodal(config):
        return
    kind = str(config.get("model_type"))
    names, tied = tied_names(kind), config.get("tie_word_embeddings", ties_by_default(kind))
    if names is None or not isinstance(tied, bool):
        return
    if any(matches(name, (*stage.new_weights, *stage.unused_weights)) for name in names):
        return
    folder = expanded(path)
    stored = _stored(folder)
    # The one tensor with the last parts of a name, which a model around this one may prefix.
    ends = ["." + ".".join(name.split(".")[-2:]) for name in names]
    found = ([one for name, one in stored.items() if f".{name}".endswith(end)] for end in ends)
    head, embedding = (ones[0] if len(ones) == 1 else None for ones in found)
    if embedding is None:
        return
    if tied and head and not _equal(head, embedding):
        yield Problem(
            key="path",
            message=f"the model shares one tensor between {head.name} and {embedding.name}, but "
            f"{folder} has two that differ",
            hint="set tie_word_embeddings: false in its config.json to train both, or name both in "
            "new_weights",
        )
    # Another matrix with as many rows may be a head under a name of an older release.
    shapes = [one.placed.shape for one in stored.values() if one is not embedding]
    rows = embedding.placed.shape[:1]
    renamed = any(len(shape) == 2 and shape[:1] == rows for shape in shapes)
    if not tied and head is None and not renamed:
        yield Problem(
            key="path",
            message=f"{folder} has no {names[0]}, and the model does not share the embedding's",
            hint=f"name it in new_weights to train a new one (`new_weights: ['{names[0]}']`), or "
            "set tie_word_embeddings: true in its config.json if it was trained so",
        )


def _stored(folder: Path) -> Mapping[str, Stored]:
    """The tensors of safetensors files; none where a file is missing or damaged."""
    found: dict[str, Stored] = {}
    try:
        for file in safetensors_files(folder):
            if not file.is_file():
                return {}
            with file.open("rb") as stream:
                head = stream.read(8)
                head += stream.read(min(int.from_bytes(head, "little"), LONGEST_HEADER))
            for name, placed in table(head).items():
                found[name] = Stored(file, name, placed, len(head) + placed.begin)
    except (OSError, ValueError, StageError):
        return {}
    return found


def _equal(one: Stored, other: Stored) -> bool:
    """Whether two tensors agree at three places. True where dtypes differ."""
    if one.placed.dtype != other.placed.dtype:
        return True
    if one.placed.shape != other.placed.shape:
        return False
    size = one.placed.end - one.placed.begin
    length = min(SAMPLE, size)
    with one.file.open("rb") as first, other.file.open("rb") as second:
        for start in (0, (size - length) // 2, size - length):
            first.seek(one.start + start)
            second.seek(other.start + start)
            if first.read(length) != second.read(length):
                return False
    return True


def frozen_problems(stage: HfSettings) -> Iterator[Problem]:
    """Yield patterns that match all or nothing, and that freeze random weights in use."""
    for pattern in stage.frozen:
        if not pattern.strip("*"):
            message = "matches all parameters" if pattern else "matches no parameter"
            hint = "write patterns of names, as in ['model.embed_tokens.*', 'model.layers.0.*']"
            yield Problem(key="frozen", message=f"{pattern!r} {message}", hint=hint)
    random = [(new, f"{new}, which new_weights draws at random") for new in stage.new_weights]
    try:
        if rows := new_rows(stage) if stage.frozen else 0:
            what = f"{rows} rows of {{}}, which are new and random and which the tokenizer uses"
            random += [(name, what.format(name)) for name in vocabulary_tables(stage).values()]
    except StageError as error:  # of the tokenizer's files
        yield Problem(message=str(error))
    for name, what in random:
        if matches(name, stage.frozen):
            hint = f"leave {name} out of frozen"
            yield Problem(key="frozen", message=f"{what}, would stay as they are", hint=hint)


def vocabulary_tables(model: HfSettings) -> dict[str, str]:
    """Return the tables with a row for each token -> their names, empty if not known."""
    config = model.config_at_hand() or {}
    kind = str(config.get("model_type"))
    other_class = model.trust_remote_code or is_multimodal(config)
    head, embedding = (None if other_class else tied_names(kind)) or ("", "")
    stated = (part.get("tie_word_embeddings") for part in (config, of_text(config)))
    tied = next((each for each in stated if each is not None), ties_by_default(kind))
    return {"embedding": embedding} | ({} if tied else {"head": head})


def new_rows(model: HfSettings) -> int:
    """Return the rows that the slot's `vocab_size` adds and that the tokenizer, if its files are
    here, has tokens for. Raises StageError for files of it that are damaged."""
    config = dataclasses.replace(model, vocab_size=None).config_at_hand() or {}
    known = of_text(config).get("vocab_size")
    if model.vocab_size is None or not isinstance(known, int) or model.init == "random":
        return 0
    place = model.tokenizer or model.path
    largest = largest_id(expanded(place)) if place else None
    used = model.vocab_size if largest is None else min(model.vocab_size, largest + 1)
    return max(0, used - known)

"""A head that is missing, or is another matrix than the embedding that it should share, found by
the headers of local files before anything starts. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline import Problem, StageError
from pipeline.checkpoint import Placed, table
from stages.model.compat import is_multimodal
from stages.model.files import is_gguf, is_local, local, safetensors_files
from stages.model.read import config_at_hand
from stages.model.source_text_compat import tied_names, ties_by_default

if TYPE_CHECKING:
    from stages.model.hf import HfModel

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


def head_problems(stage: HfModel) -> Iterator[Problem]:
    """The problem of a model whose head its files do not have, or have as a second matrix though it
    shares that of the embedding. What cannot be read here, loading reports."""
    if stage.path is None or stage.init == "random" or stage.trust_remote_code:
        return
    config = config_at_hand(stage)
    if config is None or is_multimodal(config):
        return
    names = tied_names(str(config.get("model_type")))
    tied = config.get("tie_word_embeddings", ties_by_default(str(config.get("model_type"))))
    if names is None or not isinstance(tied, bool):
        return
    head, embedding = (_found(_stored(stage), name) for name in names)
    patterns = (*stage.new_weights, *stage.unused_weights)
    if any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
        return
    if tied and head and embedding and not _equal(head, embedding):
        yield Problem(
            key="path",
            message=f"the model shares one tensor between {head.name} and {embedding.name}, but "
            f"{local(stage.path)} has two that differ",
            hint="set tie_word_embeddings: false in its config.json to train both, or name both in "
            "new_weights",
        )
    if not tied and head is None and embedding and not _renamed(stage, embedding):
        yield Problem(
            key="path",
            message=f"{local(stage.path)} has no {names[0]}, and the model does not share the "
            "embedding's",
            hint=f"name it in new_weights to train a new one (`new_weights: ['{names[0]}']`), or "
            "set tie_word_embeddings: true in its config.json if it was trained so",
        )


def _stored(stage: HfModel) -> Mapping[str, Stored]:
    """The tensors of local safetensors files; none where a file is missing or damaged."""
    assert stage.path is not None
    found: dict[str, Stored] = {}
    if not is_local(stage.path) or is_gguf(stage.path) or stage.gguf_file is not None:
        return found
    try:
        for file in safetensors_files(local(stage.path)):
            found |= _header(file)
    except (OSError, ValueError, StageError):
        return {}
    return found


def _header(file: Path) -> Mapping[str, Stored]:
    """Raises OSError and ValueError for a file that is no safetensors."""
    if not file.is_file():
        raise ValueError("no regular file")
    with file.open("rb") as stream:
        head = stream.read(8)
        head += stream.read(min(int.from_bytes(head, "little"), LONGEST_HEADER))
    return {
        name: Stored(file, name, placed, len(head) + placed.begin)
        for name, placed in table(head).items()
    }


def _found(stored: Mapping[str, Stored], wanted: str) -> Stored | None:
    """The one tensor with the last parts of a name, which a model around this one may prefix."""
    end = ".".join(wanted.split(".")[-2:])
    found = [one for name, one in stored.items() if f".{name}".endswith(f".{end}")]
    return found[0] if len(found) == 1 else None


def _renamed(stage: HfModel, embedding: Stored) -> bool:
    """Whether another matrix has as many rows: a head under a name of an older release, perhaps."""
    rows = embedding.placed.shape[0]
    others: list[Any] = [one for one in _stored(stage).values() if one.name != embedding.name]
    return any(len(one.placed.shape) == 2 and one.placed.shape[0] == rows for one in others)


def _equal(one: Stored, other: Stored) -> bool:
    """Whether two tensors agree at their beginning, middle and end. True where dtypes differ, since
    values are not read here."""
    if one.placed.dtype != other.placed.dtype:
        return True
    if one.placed.shape != other.placed.shape:
        return False
    size = one.placed.end - one.placed.begin
    length = min(SAMPLE, size)
    return all(
        _bytes(one, start, length) == _bytes(other, start, length)
        for start in (0, (size - length) // 2, size - length)
    )


def _bytes(stored: Stored, start: int, length: int) -> bytes:
    with stored.file.open("rb") as stream:
        stream.seek(stored.start + start)
        return stream.read(length)

"""The config of a `model.hf` slot, and the header of a GGUF file, read without transformers.

Headers (ggml's docs/gguf.md) are read here because the gguf package makes an array of every token
of the vocabulary, which takes seconds, and walks through whatever number of elements a damaged
header claims.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pipeline import StageError
from pipeline.utils import open_regular
from stages.model.files import download, is_gguf, is_local, local, read_json
from stages.model.settings import HfSettings

TUNED = ("-Instruct", "-instruct", "-chat-hf", "-Base", "-base", "-Chat", "-it", "-pt")
"""Endings of hub ids that name a kind of tuning."""
GGUF_KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
}
"""Metadata of a GGUF file, after the architecture's name -> the config's key."""


def known_config(repo: str) -> dict[str, Any] | None:
    """Return the config of a well-known model of the hub, by `known_models.json`; None for other
    models. It needs no network and no accepted licence."""
    base = repo
    for ending in TUNED:
        base = base.removesuffix(ending)
    models = read_json(Path(__file__).with_name("known_models.json"))
    return models.get(base) or models.get(f"{base}-hf") or models.get(repo)


def read_config(stage: HfSettings) -> dict[str, Any]:
    """Return the config, with the slot's own vocabulary size; a hub model's config.json is
    downloaded, if it is not in the hub's cache. Raises StageError if it cannot be read."""
    given, path = stage.config, stage.path
    if given is not None:
        config = dict(given) if isinstance(given, Mapping) else read_json(local(given))
    elif path is not None and not is_local(path):
        config = known_config(path) or read_json(download(path, stage.revision))
    else:
        assert path is not None
        file = local(path) if is_gguf(path) else local(path) / (stage.gguf_file or "config.json")
        config = _of_gguf(file) if is_gguf(path) or stage.gguf_file else read_json(file)
    if stage.vocab_size is not None:
        config["vocab_size"] = stage.vocab_size
    return config


def config_at_hand(stage: HfSettings) -> dict[str, Any] | None:
    """Return the config, if it can be read without a network."""
    if stage.path is None and stage.config is None:
        return None
    if stage.path is not None and not is_local(stage.path) and known_config(stage.path) is None:
        return None
    try:
        return read_config(stage)
    except StageError:
        return None


def _of_gguf(file: Path) -> dict[str, Any]:
    header = gguf_header(file)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise StageError(f"{file} has no tensor 'token_embd.weight'")
    kind = header.metadata.get("general.architecture")
    experts = header.metadata.get(f"{kind}.expert_count", 0)
    if experts != 0:
        raise StageError(
            f"{file}: its header does not have all sizes of a {kind} with {experts} experts",
            hint="plan it from a folder in Hugging Face layout",
        )
    found = {name: header.metadata.get(f"{kind}.{key}") for key, name in GGUF_KEYS.items()}
    return {
        "model_type": kind,
        **{name: value for name, value in found.items() if value is not None},
        "vocab_size": embedding.shape[-1],
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


MAGIC = b"GGUF"
VERSIONS = (2, 3)
"""Version 1 has numbers of other sizes; 2^24 or more is a version in another byte order."""
LONGEST_HEADER = 1 << 26
"""Bytes of a header: more than any tokenizer takes, and read in seconds."""
MOST_DIMENSIONS = 4
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Type of a value -> its format in `struct`."""
STRING, ARRAY = 8, 9


class GgufTensor(NamedTuple):
    """A tensor of a GGUF file."""

    shape: tuple[int, ...]
    """Innermost dimension first."""
    kind: int
    """Number of its type, as in ggml."""
    offset: int
    """Its first byte, counted from the end of the header."""


class GgufHeader(NamedTuple):
    """The part of a GGUF file before its weights."""

    metadata: Mapping[str, Any]
    """Every array is None."""
    tensors: Mapping[str, GgufTensor]
    size: int
    """Bytes of the header, with those that align the weights after it."""


def gguf_header(file: Path) -> GgufHeader:
    """Return the header of a file; an unchanged file is read once. Raises StageError."""
    try:
        found = file.stat()
        return _header(file, found.st_ino, found.st_size, found.st_mtime_ns)
    except (OSError, ValueError) as error:
        raise unreadable(file, error) from error


def unreadable(file: Path, error: Exception) -> StageError:
    """Return the error of a GGUF file that is damaged."""
    return StageError(f"{file} cannot be read as GGUF: {error}", hint="download or copy it again")


@functools.lru_cache(maxsize=8)
def _header(file: Path, _inode: int, size: int, _changed: int) -> GgufHeader:
    with open_regular(file) as stream:
        too_long = size > LONGEST_HEADER
        why = "its header is too long" if too_long else "the file ends in its header"
        header = _Reader(stream, min(size, LONGEST_HEADER), why)
        if header.take(len(MAGIC)) != MAGIC:
            raise ValueError("it is not a GGUF file")
        version, tensors, pairs = header.numbers("IQQ")
        if version not in VERSIONS:
            raise ValueError(f"GGUF version {version} is not known")
        metadata: dict[str, Any] = {}
        placed: dict[str, GgufTensor] = {}
        for number in range(pairs + tensors):
            name = header.text()
            if name in (metadata if number < pairs else placed):
                raise ValueError(f"it says {name!r} twice")
            if number < pairs:
                metadata[name] = header.value()
                continue
            (dimensions,) = header.numbers("I")
            if not 0 < dimensions <= MOST_DIMENSIONS:
                raise ValueError(f"{name} has {dimensions} dimensions")
            *shape, kind, offset = header.numbers(f"{dimensions}QIQ")
            placed[name] = GgufTensor(tuple(shape), kind, offset)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its weights are aligned to {alignment} bytes")
        end = stream.tell()
        return GgufHeader(metadata, placed, end + -end % alignment)


@dataclass
class _Reader:
    """Reads one value after another. Raises ValueError where the header claims more than the file,
    or any header, can hold, before anything is allocated or walked through."""

    stream: BinaryIO
    left: int
    why: str

    def take(self, count: int, *, skip: bool = False) -> bytes:
        """Return the next bytes, or `skip` them."""
        if count > self.left:
            raise ValueError(self.why)
        self.left -= count
        if skip:
            self.stream.seek(count, 1)
        return b"" if skip else self.stream.read(count)

    def numbers(self, form: str) -> tuple[Any, ...]:
        """Return little-endian numbers of a `struct` format."""
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))

    def text(self) -> str:
        return self.take(self.numbers("Q")[0]).decode("utf-8", "replace")

    def value(self) -> Any:
        """Return the value of a piece of metadata, None for an array."""
        (kind,) = self.numbers("I")
        if kind == STRING:
            return self.text()
        inner, count = self.numbers("IQ") if kind == ARRAY else (kind, 1)
        if inner == ARRAY:
            raise ValueError("it holds arrays of arrays, which nothing in a model needs")
        if inner not in SCALARS and inner != STRING:
            raise ValueError(f"there is no type {inner} in GGUF")
        if kind != ARRAY:
            return self.numbers(SCALARS[kind])[0]
        if inner != STRING:
            self.take(count * struct.calcsize(f"<{SCALARS[inner]}"), skip=True)
        for _ in range(count if inner == STRING else 0):
            self.take(self.numbers("Q")[0], skip=True)
        return None

"""The header of a GGUF file (ggml's docs/gguf.md): metadata and shapes, without arrays or weights.

The gguf package makes an array of every token of the vocabulary, which takes seconds, and walks
through whatever number of elements a damaged header claims.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pipeline.utils import open_regular

T = TypeVar("T")

MAGIC = b"GGUF"
VERSIONS = (2, 3)
"""Version 1 has numbers of other sizes; 2^24 or more is a version in another byte order."""
MOST = 1 << 26
"""Bytes of a header: more than any tokenizer takes, and read in seconds."""
MOST_DIMENSIONS = 4
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Type of a value -> its format in `struct`."""
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")
"""Bytes of a string, which stand before it."""


def read_header(file: Path) -> tuple[Mapping[str, Any], Mapping[str, tuple[int, ...]]]:
    """Return the metadata, in which every array is None, and the shape of every tensor, innermost
    dimension first; a file that has not changed is read once. Raises ValueError for a file that is
    no GGUF or ends in its header, OSError."""
    found = file.stat()
    return _read(file, found.st_ino, found.st_size, found.st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _read(
    file: Path, _inode: int, _size: int, _changed: int
) -> tuple[Mapping[str, Any], Mapping[str, tuple[int, ...]]]:
    with open_regular(file) as stream:
        header = _Header(stream, file.stat().st_size)
        if header.bytes(len(MAGIC)) != MAGIC:
            raise ValueError("it is not a GGUF file")
        version, tensors, pairs = header.numbers("IQQ")
        if version not in VERSIONS:
            raise ValueError(f"GGUF version {version} is not known")
        metadata = _unique(header.pair() for _ in range(pairs))
        return metadata, _unique(header.tensor() for _ in range(tensors))


def _unique(pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
    found: dict[str, T] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it says {name!r} twice")
        found[name] = value
    return found


class _Header:
    """Reads one value after another. Raises ValueError where the header claims more than the file,
    or any header, can hold, before anything is allocated or walked through."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream = stream
        self._left = min(size, MOST)
        self._why = "the file ends in its header" if size <= MOST else "its header is too long"

    def bytes(self, count: int) -> bytes:
        self._claim(count)
        return self._stream.read(count)

    def numbers(self, form: str) -> tuple[Any, ...]:
        """Return little-endian numbers of a `struct` format."""
        return struct.unpack(f"<{form}", self.bytes(struct.calcsize(f"<{form}")))

    def pair(self) -> tuple[str, Any]:
        """Return the name and the value of a piece of metadata."""
        name, (kind,) = self._text(), self.numbers("I")
        if kind == STRING:
            return name, self._text()
        if kind != ARRAY:
            return name, self.numbers(_scalar(kind))[0]
        inner, count = self.numbers("IQ")
        if inner != STRING:
            self._skip(count * struct.calcsize(f"<{_scalar(inner)}"))
        for _ in range(count if inner == STRING else 0):
            self._skip(LENGTH.unpack(self.bytes(LENGTH.size))[0])
        return name, None

    def tensor(self) -> tuple[str, tuple[int, ...]]:
        """Return the name and the shape of a tensor."""
        name, (dimensions,) = self._text(), self.numbers("I")
        if not 0 < dimensions <= MOST_DIMENSIONS:
            raise ValueError(f"{name} has {dimensions} dimensions")
        *shape, _kind, _place = self.numbers(f"{dimensions}QIQ")
        return name, tuple(shape)

    def _text(self) -> str:
        return self.bytes(self.numbers("Q")[0]).decode("utf-8", "replace")

    def _skip(self, count: int) -> None:
        self._claim(count)
        self._stream.seek(count, 1)

    def _claim(self, count: int) -> None:
        if count > self._left:
            raise ValueError(self._why)
        self._left -= count


def _scalar(kind: int) -> str:
    if kind == ARRAY:
        raise ValueError("it holds arrays of arrays, which nothing in a model needs")
    if kind not in SCALARS:
        raise ValueError(f"there is no type {kind} in GGUF")
    return SCALARS[kind]

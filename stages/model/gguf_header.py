"""The header of a GGUF file (ggml's docs/gguf.md): metadata and shapes, without arrays or weights.

The gguf package makes an array of every token of the vocabulary, which takes seconds.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

T = TypeVar("T")

MAGIC = b"GGUF"
VERSIONS = (2, 3)
"""Version 1 has numbers of other sizes; 2^24 or more is a version in another byte order."""
MOST = 1 << 26
"""Bytes of a header: more than any tokenizer takes, and read in seconds."""
MOST_DIMENSIONS = 4
ALIGNMENT = 32
"""Bytes, unless the file says otherwise."""
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Type of a value -> its format in `struct`."""
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class Array:
    """Stands for an array, whose elements were not read."""

    elements: int

    def __repr__(self) -> str:
        return f"an array of {self.elements} elements"


def read_header(
    file: Path, sizes: Mapping[int, tuple[int, int]] | None = None
) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Metadata, and the shape of every tensor, innermost dimension first.

    `sizes` maps a tensor's type to elements and bytes of a block; with it, the tensors have to be
    in the file too. Raises ValueError for a file that is no GGUF or is cut short, OSError.
    """
    with file.open("rb") as stream:
        header = _Header(stream, file.stat().st_size, sizes or {})
        if header.bytes(len(MAGIC)) != MAGIC:
            raise ValueError("it is no GGUF file")
        version, tensors, pairs = header.numbers("IQQ")
        if version not in VERSIONS:
            raise ValueError(f"GGUF version {version} is not known")
        metadata = _unique(header.pair() for _ in range(pairs))
        found = metadata, _unique(header.tensor() for _ in range(tensors))
        if sizes:
            header.require_tensors(metadata.get("general.alignment", ALIGNMENT))
        return found


def _unique(pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
    found: dict[str, T] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it says {name!r} twice")
        found[name] = value
    return found


class _Header:
    """Reads one thing after another. Raises ValueError where the header claims more than the file,
    or any header, can hold, before anything is allocated or walked through."""

    def __init__(self, stream: BinaryIO, size: int, sizes: Mapping[int, tuple[int, int]]) -> None:
        self._stream, self._size, self._sizes = stream, size, sizes
        self._tensors = 0
        """Bytes behind the header."""
        self._left = min(size, MOST)
        self._why = "the file ends in its header" if size <= MOST else "its header is too long"

    def bytes(self, count: int) -> bytes:
        self._claim(count)
        return self._stream.read(count)

    def numbers(self, form: str) -> tuple[Any, ...]:
        """Little-endian numbers of a `struct` format."""
        return struct.unpack(f"<{form}", self.bytes(struct.calcsize(f"<{form}")))

    def pair(self) -> tuple[str, Any]:
        """Name and value of a piece of metadata."""
        name, (kind,) = self._text(), self.numbers("I")
        if kind == STRING:
            return name, self._text()
        if kind == ARRAY:
            return name, self._array()
        return name, self.numbers(_scalar(kind))[0]

    def tensor(self) -> tuple[str, tuple[int, ...]]:
        """Name and shape of a tensor."""
        name, (dimensions,) = self._text(), self.numbers("I")
        if not 0 < dimensions <= MOST_DIMENSIONS:
            raise ValueError(f"{name} has {dimensions} dimensions")
        shape = self.numbers(f"{dimensions}Q")
        kind, place = self.numbers("IQ")
        elements, size = self._sizes.get(kind, (1, 0))
        self._tensors = max(self._tensors, place + math.prod(shape) // elements * size)
        return name, shape

    def require_tensors(self, alignment: Any) -> None:
        """Raise ValueError if the tensors, which begin at a multiple of `alignment`, are cut."""
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"its alignment is {alignment!r}")
        wanted = -(-self._stream.tell() // alignment) * alignment + self._tensors
        if wanted > self._size:
            raise ValueError(f"the file is cut short: {self._size} bytes instead of {wanted}")

    def _claim(self, count: int) -> None:
        if count > self._left:
            raise ValueError(self._why)
        self._left -= count

    def _text(self) -> str:
        return self.bytes(self.numbers("Q")[0]).decode("utf-8", "replace")

    def _array(self) -> Array:
        kind, count = self.numbers("IQ")
        if kind == STRING:
            for _ in range(count):
                self._skip(self.numbers("Q")[0])
        else:
            self._skip(count * struct.calcsize(f"<{_scalar(kind)}"))
        return Array(count)

    def _skip(self, count: int) -> None:
        self._claim(count)
        self._stream.seek(count, 1)


def _scalar(kind: int) -> str:
    if kind == ARRAY:
        raise ValueError("it holds arrays of arrays, which nothing in a model needs")
    if kind not in SCALARS:
        raise ValueError(f"there is no type {kind} in GGUF")
    return SCALARS[kind]

"""The sizes in a GGUF file's header (ggml's docs/gguf.md), without reading its weights.

The gguf package makes an array of every token of the vocabulary, which takes seconds.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

MAGIC = b"GGUF"
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Type of a value -> how struct calls it."""
STRING, ARRAY = 8, 9


def read_header(file: Path) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Metadata but for arrays, and the shape of every tensor, innermost dimension first. Raises
    ValueError for a file that is none, OSError."""
    with file.open("rb") as stream:
        if stream.read(4) != MAGIC:
            raise ValueError("it is no GGUF file")
        _, tensors, pairs = _numbers(stream, "IQQ")
        metadata = {}
        for _ in range(pairs):
            name = _text(stream)
            metadata[name] = _value(stream, _numbers(stream, "I")[0])
        return metadata, dict(_tensor(stream) for _ in range(tensors))


def _numbers(stream: BinaryIO, form: str) -> tuple[Any, ...]:
    size = struct.calcsize(f"<{form}")
    data = stream.read(size)
    if len(data) != size:
        raise ValueError("the file ends in its header")
    return struct.unpack(f"<{form}", data)


def _text(stream: BinaryIO) -> str:
    return stream.read(_numbers(stream, "Q")[0]).decode("utf-8", "replace")


def _value(stream: BinaryIO, kind: int) -> Any:
    if kind == STRING:
        return _text(stream)
    if kind == ARRAY:
        return _skip_array(stream)
    if kind not in SCALARS:
        raise ValueError(f"there is no type {kind} in GGUF")
    return _numbers(stream, SCALARS[kind])[0]


def _skip_array(stream: BinaryIO) -> None:
    kind, count = _numbers(stream, "IQ")
    if kind in SCALARS:
        stream.seek(count * struct.calcsize(SCALARS[kind]), 1)
        return
    for _ in range(count):
        if kind == STRING:
            stream.seek(_numbers(stream, "Q")[0], 1)
        else:
            _value(stream, kind)


def _tensor(stream: BinaryIO) -> tuple[str, tuple[int, ...]]:
    name = _text(stream)
    shape = _numbers(stream, f"{_numbers(stream, 'I')[0]}Q")
    _numbers(stream, "IQ")
    return name, shape

"""The gguf package's reader, quicker: its own makes two views of a memory map for each token of the
vocabulary, which takes seconds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
from gguf import GGUFReader, GGUFValueType


class QuickReader(GGUFReader):  # type: ignore[misc]
    """Reader whose views are plain arrays, which cost a tenth of a memory map's."""

    def _get(
        self, offset: int, dtype: Any, count: int = 1, override_order: str | None = None
    ) -> np.ndarray[Any, Any]:
        order = override_order or self.byte_order
        kind = np.dtype(dtype)
        kind = kind if order == "I" else kind.newbyteorder(order)
        # as from a slice, fewer of them where the file ends
        there = max(min(int(count), (self.data.size - offset) // kind.itemsize), 0)
        return np.frombuffer(self.data, kind, there, offset if there else 0)


class TensorsOnly(QuickReader):
    """Reader of all but arrays of metadata, which have no values."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        size = 12 + self._size(orig_offs + 12, kind[0], int(length[0]))
        return size, [kind, length], [], [GGUFValueType.ARRAY, GGUFValueType(kind[0])]

    def _size(self, start: int, kind: int, length: int) -> int:
        """Bytes of an array's elements."""
        if kind != GGUFValueType.STRING:
            return length * int(np.dtype(self.gguf_scalar_to_np[GGUFValueType(kind)]).itemsize)
        offset, number = start, np.dtype(np.uint64).newbyteorder(self.byte_order)
        for _ in range(length):
            offset += 8 + int(np.frombuffer(self.data, number, 1, offset)[0])
        return offset - start


@contextlib.contextmanager
def read_quickly() -> Iterator[None]:
    """Have transformers read GGUF files with the quicker reader in the body."""
    original = gguf.GGUFReader
    gguf.GGUFReader = QuickReader
    try:
        yield
    finally:
        gguf.GGUFReader = original

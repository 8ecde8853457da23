"""Arrays on disk that are compared with their checksums before they are used, block by block."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from xxhash import xxh3_64_intdigest

from pipeline.errors import StageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK = 1 << 16
"""Bytes that have a checksum of their own: no more than systems read ahead anyway."""
SUMS = ".sums"
"""Behind the name of the file that has the checksums (64 bits each) of another one's blocks."""


def write_sums(path: Path) -> None:
    """Write the checksums of a file's blocks beside it."""
    with path.open("rb") as file:
        sums = array("Q", map(xxh3_64_intdigest, iter(lambda: file.read(BLOCK), b"")))
    np.array(sums, "<u8").tofile(path.with_name(path.name + SUMS))


class VerifiedArray:
    """A flat array in a file, read-only. Each block is read and compared once, when something of it
    is first asked for; the file is mapped, so what is asked for takes no memory of its own."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._path = path
        empty = path.stat().st_size == 0  # which cannot be mapped
        self._array: NDArray[Any] = np.empty(0, dtype) if empty else np.memmap(path, dtype, "r")
        self._sums = np.fromfile(path.with_name(path.name + SUMS), "<u8")
        self._known = np.zeros(len(self._sums), dtype=bool)

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, span: slice) -> NDArray[Any]:
        """Raises StageError when the file is not as it was written."""
        start, stop, _ = span.indices(len(self))
        size = self._array.itemsize
        first, end = start * size // BLOCK, -(-stop * size // BLOCK)
        if not self._known[first:end].all():
            self._verify(first, end)
        return self._array[start:stop]

    def _verify(self, first: int, end: int) -> None:
        content = self._array.view("u1")
        for block in range(first, end):
            begin = block * BLOCK
            if xxh3_64_intdigest(content[begin : begin + BLOCK].data) != self._sums[block]:
                raise StageError(
                    f"{self._path} has changed since it was written: bytes {begin} to "
                    f"{min(begin + BLOCK, len(content)) - 1} are others",
                    hint=f"remove {self._path.parent}; its tokens are made again",
                )
            self._known[block] = True

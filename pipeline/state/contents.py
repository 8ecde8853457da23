"""Does a data file say of itself what the manifest says of it?

Checksums tell whether bytes are those that were written. A manifest that was put together
wrongly, or edited, can name the right bytes wrongly; each file's own header is the second witness.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.engine import WEIGHT
from pipeline.state.manifest import Piece, TensorEntry
from pipeline.state.safetensors_file import Placed, table


def contradiction(head: bytes, pieces: Iterable[tuple[TensorEntry, Piece]]) -> str | None:
    """The first tensor that does not lie in the file where its piece says; None if all do.

    `head` is what precedes the file's data.
    """
    found = table(head)
    for tensor, piece in pieces:
        if not any(
            entry.dtype == tensor.dtype
            and len(head) + entry.begin + (piece.start - first) * tensor.itemsize == piece.offset
            and len(head) + entry.end >= piece.offset + (piece.stop - piece.start) * tensor.itemsize
            for first, entry in _candidates(found, tensor.key, piece)
        ):
            return tensor.key
    return None


def _candidates(found: dict[str, Placed], key: str, piece: Piece) -> Iterable[tuple[int, Placed]]:
    """Entries under the names that layouts use, with the tensor's element that each begins at."""
    for name, first in ((f"{key}@{piece.start}", piece.start), (key, 0), (_short(key), 0)):
        if name in found:
            yield first, found[name]


def _short(key: str) -> str:
    return key.removeprefix(f"{WEIGHT}/")

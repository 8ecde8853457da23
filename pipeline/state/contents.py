"""Does a data file say of itself what the manifest says of it?

Checksums tell whether bytes are those that were written. A manifest that was put together
wrongly, or edited, can name the right bytes wrongly; each file's own header is the second witness.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.engine import WEIGHT
from pipeline.state.manifest import Piece, TensorEntry
from pipeline.state.safetensors_file import Placed, table


def contradiction(head: bytes, pieces: Iterable[tuple[TensorEntry, Piece]]) -> str:
    """What a file and its pieces in the manifest disagree about; empty if nothing.

    `head` is what precedes the file's data. Raises ValueError when it is none.
    """
    entries = table(head)
    named = set()
    for tensor, piece in pieces:
        name = _name(entries, tensor, piece)
        if name is None or not _lies_in(entries[name], len(head), tensor, piece, name):
            return f"{tensor.key} is not where the manifest says"
        named.add(name)
    unnamed = entries.keys() - named
    return f"{min(unnamed)} is not in the manifest" if unnamed else ""


def _name(entries: dict[str, Placed], tensor: TensorEntry, piece: Piece) -> str | None:
    """The name under which the layouts put a piece."""
    names = (_part(tensor, piece), tensor.key, tensor.key.removeprefix(f"{WEIGHT}/"))
    return next((name for name in names if name in entries), None)


def _lies_in(entry: Placed, data_start: int, tensor: TensorEntry, piece: Piece, name: str) -> bool:
    begin, end = data_start + entry.begin, data_start + entry.end
    size = (piece.stop - piece.start) * tensor.itemsize
    if name == _part(tensor, piece):
        return entry.dtype == tensor.dtype and piece.offset == begin and size == end - begin
    return (
        (entry.dtype, entry.shape) == (tensor.dtype, tensor.shape)
        and piece.offset == begin + piece.start * tensor.itemsize
        and piece.offset + size <= end
    )


def _part(tensor: TensorEntry, piece: Piece) -> str:
    return f"{tensor.key}@{piece.start}"

"""A quick look at weight files by which two copies are told apart: their sizes, headers, and pieces
of what they hold."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeline import StageError, system_errors_as
from stages.weights.safetensors import places

PIECE = 4096
"""Bytes of a piece: a page of memory, and of most disks."""
PIECES = 512
"""Pieces of a file at most."""


def sampled(files: Sequence[Path]) -> str:
    """Hex sha256 over each file's name, size, beginning, and pieces: of a safetensors file the
    middle of every tensor, or of 512 evenly chosen ones; of another file 512 at even distances.

    A training changes all of a tensor, so its result differs from what it began with; a change of
    a few rows may be missed. Reads 2 MiB a file, or less. Raises StageError.
    """
    with system_errors_as(StageError), ThreadPoolExecutor(8) as pool:
        found = list(pool.map(_look, files))
    return hashlib.sha256(b"".join(found)).hexdigest()


def _look(file: Path) -> bytes:
    size = file.stat().st_size
    offsets = [*range(0, size, max(PIECE, size // PIECES))]
    if file.suffix == ".safetensors":
        each = places(file).values()
        offsets = sorted(one.offset + max(0, one.spec.nbytes - PIECE) // 2 for one in each)
    count = min(len(offsets), PIECES)
    even = (offsets[number * len(offsets) // count] for number in range(count))
    digest = hashlib.sha256(f"{file.name} {size}\0".encode())
    with file.open("rb", buffering=0) as stream:
        for offset in (0, *even):
            digest.update(os.pread(stream.fileno(), PIECE, offset))
    return digest.digest()

"""What the file systems of all stages need alike."""

from __future__ import annotations

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Whoever reads the file sees all of the old text or all of the new."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)


def read_at(descriptor: int, offset: int, into: memoryview) -> int:
    """Fill `into` from byte `offset` of an open file on; its bytes, fewer where the file ends."""
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def write_at(descriptor: int, offset: int, data: memoryview) -> None:
    """Write all of `data` to byte `offset` of an open file."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def sync_tree(folder: Path) -> None:
    """Force everything in a folder to disk, and the folder itself."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def sync(path: Path) -> None:
    """Force a file's content, or a folder's entries, to disk; a rename in a synced folder survives
    a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

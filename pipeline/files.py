"""What the file systems of all stages need alike."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

WRITE = 1 << 17
"""Bytes of one call. ext4 and XFS take memory for a call in as large a piece as it has (large
folios); a virtual machine may have given pieces of 2 MiB back to its host, and having them again
takes ten times as long as writing does."""


def replace_text(path: Path, text: str) -> None:
    """Whoever reads the file sees all of the old text or all of the new."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)


def try_writing(path: Path) -> None:
    """Raises OSError where a file could not be written: before the work whose result it is for.
    What is there stays, and nothing new is left."""
    new = not path.exists()
    if not new and not path.is_file():  # who reads a pipe would take this for its end
        return
    path.open("ab").close()
    if new:
        path.resolve().unlink()  # what a link leads to


def page_aligned(size: int) -> memoryview:
    """Memory to read into, for `size` bytes, of this process alone. Where it begins a few bytes
    after a page, as that of a large `bytearray` does, AMD's processors since Zen 3 copy into it at
    a fifth of the speed (https://sourceware.org/bugzilla/show_bug.cgi?id=30994)."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # the default is shared with forked processes
    return memoryview(mmap.mmap(-1, max(size, 1), flags=private))[:size]


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
        done += os.pwrite(descriptor, data[done : done + WRITE], offset + done)


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

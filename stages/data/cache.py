"""Tokenised data on disk. An entry is found by the digest of its inputs; it is complete or absent,
and each block of its arrays is verified against a checksum before it is used."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64_intdigest

from pipeline import Context, StageError
from pipeline.utils import in_short, sync
from stages.digests import digest

if TYPE_CHECKING:
    from numpy.typing import NDArray


FORMAT = 8
"""Version of the files of an entry; entries of another version are built again."""
KEYS = 3
"""Version of the keys. Checkpoints compare keys to recognise their data, so it stays the same."""
META = "meta.json"
BLOCK = 1 << 16
"""Bytes that share a checksum: no more than operating systems read ahead anyway."""
SUMS = ".sums"
"""Suffix of the file with the checksums (64 bits each, little-endian) of another file's blocks."""

Counts = dict[str, int]
Build = Callable[[Path], Counts]
"""Writes an entry's files into a folder and returns its counts."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A complete cache entry: a folder of arrays and their counts."""

    folder: Path
    key: str
    counts: Counts


@contextlib.contextmanager
def cache_errors(folder: Path) -> Iterator[None]:
    """Raise operating system errors from writing into a cache folder as StageError."""
    try:
        yield
    except OSError as error:
        raise StageError(
            f"cannot write the cache in {folder}: {error}", hint="set `cache` to another folder"
        ) from error


def prepare(ctx: Context, folder: Path, make_key: Callable[[], str], build: Build) -> Entry:
    """Return the entry of a key, and build it if it is absent (collective). Rank 0 computes the key
    and builds. Then one process of every node that does not see rank 0's folder builds the node's
    own. Raises StageError if that node computes another key, or if the entries of two nodes
    differ."""

    def build_same(partial: Path) -> Counts:
        found = make_key()
        if found != key:
            raise StageError(
                f"the files of this machine ({socket.gethostname()}, rank {ctx.dist.rank}) differ "
                f"from rank 0's: their digest is {in_short(found)}, that is {in_short(key)}",
                hint="copy the same files to every machine, or share them",
            )
        return build(partial)

    key = ""
    with ctx.dist.rank0_first() as main:
        if main:
            key = make_key()
            prepare_locally(folder, key, build)
    key = ctx.dist.broadcast_str(key if main else None)
    if not main and ctx.dist.local_rank == 0:
        prepare_locally(folder, key, build_same)
    ctx.dist.barrier()
    entry = prepare_locally(folder, key, build_same)
    # The checksums cover all arrays.
    contents = hashlib.sha256(json.dumps(entry.counts, sort_keys=True).encode())
    for path in sorted(entry.folder.glob(f"*{SUMS}")):
        contents.update(path.name.encode() + path.read_bytes())
    same = {f"entry {in_short(key)}": contents.hexdigest()}
    ctx.dist.require_same("tokenised data", same)
    return entry


def prepare_locally(folder: Path, key: str, build: Build) -> Entry:
    """Return the entry of a key, and build it in this process if it is absent."""
    final = folder / key
    if _complete(final) is None:
        with cache_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            # Remove what killed builds have left; a live build has written to its files today.
            for left in folder.glob("*.partial"):
                with contextlib.suppress(FileNotFoundError):  # finished meanwhile
                    written = [path.stat().st_mtime for path in (left, *left.iterdir())]
                    if time.time() - max(written) > 24 * 3600:
                        shutil.rmtree(left, ignore_errors=True)
            partial = Path(tempfile.mkdtemp(prefix=f"{key[:16]}-", suffix=".partial", dir=folder))
            try:
                counts = build(partial)
                for path in list(partial.iterdir()):
                    write_sums(path)
                sizes = {path.name: path.stat().st_size for path in partial.iterdir()}
                meta: dict[str, Any] = {"format": FORMAT, "sizes": sizes, "counts": counts}
                meta["digest"] = digest(meta)
                (partial / META).write_text(json.dumps(meta, indent=1), encoding="utf-8")
                for path in partial.iterdir():
                    sync(path)
                if final.exists() and _complete(final) is None:
                    shutil.rmtree(final)
                try:
                    partial.replace(final)
                except OSError:
                    if _complete(final) is None:  # else another run was faster, with the same
                        raise
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    found = _complete(final)
    if found is None:
        raise StageError(f"the cache entry {final} is gone", hint="is the disk full?")
    return Entry(folder=final, key=key, counts=found)


def _complete(final: Path) -> Counts | None:
    """Return the counts of an entry whose files all have their original size, else None. Their
    content is verified when it is read."""
    try:
        meta = json.loads((final / META).read_text("utf-8"))
        written = meta.pop("digest")
        sizes = {name: (final / name).stat().st_size for name in meta["sizes"]}
        if written != digest(meta) or meta["format"] != FORMAT or sizes != meta["sizes"]:
            return None
        return dict(meta["counts"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_sums(path: Path) -> None:
    """Write the checksums of a file's blocks next to it."""
    with path.open("rb") as file, path.with_name(path.name + SUMS).open("wb") as sums:
        while block := file.read(BLOCK):
            sums.write(xxh3_64_intdigest(block).to_bytes(8, "little"))


class VerifiedArray:
    """A flat, read-only array in a memory-mapped file. Each block is compared with its checksum
    once, before its first use: a start reads no more of the data than it needs."""

    def __init__(self, path: Path, dtype: str) -> None:
        import numpy as np

        self._path = path
        empty = path.stat().st_size == 0  # which cannot be mapped
        self._array: NDArray[Any] = np.empty(0, dtype) if empty else np.memmap(path, dtype, "r")
        self._sums = np.fromfile(path.with_name(path.name + SUMS), "<u8")
        self._verified = np.zeros(len(self._sums), dtype=bool)

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, span: slice) -> NDArray[Any]:
        """Return a part of the array. Raises StageError if the file has changed on the disk."""
        start, stop, _ = span.indices(len(self))
        size = self._array.itemsize
        first, end = start * size // BLOCK, -(-stop * size // BLOCK)
        content = self._array.view("u1")
        for block in () if self._verified[first:end].all() else range(first, end):
            begin = block * BLOCK
            if xxh3_64_intdigest(content[begin : begin + BLOCK].data) != self._sums[block]:
                raise StageError(
                    f"{self._path} has changed since it was written: bytes {begin} to "
                    f"{min(begin + BLOCK, len(content)) - 1} differ",
                    hint=f"remove {self._path.parent}; its tokens are made again",
                )
            self._verified[block] = True
        return self._array[start:stop]

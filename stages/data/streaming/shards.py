"""Shards of a stream: listed, fetched and tokenised one at a time, a bounded number kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline import StageError, in_words
from pipeline.utils import append_line, counted, open_address, read_lines, wait_for_lock
from stages.data import tokenize
from stages.data.cache import Counts, cache_errors, digest, prepare_locally
from stages.data.documents import Document, Documents, formatted
from stages.data.mistakes import Mistakes
from stages.data.samples import TokenBlocks, block_count
from stages.data.sources import (
    LocalFile,
    Patterns,
    content_digest,
    each_pattern,
    find_files,
    kind_problems,
)

_EDGE = 4096
"""Bytes at each end of a shard by which machines are compared."""
_DIGEST = "sha256"
"""File of an entry with the digest of the shard's file."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of a corpus."""

    address: str
    """A local path, or an address that fsspec knows."""
    size: int
    """Size in bytes."""
    stamp: str
    """Version of the file as its file system reports it (a time, an ETag)."""

    @property
    def name(self) -> str:
        """The file's own name."""
        return PurePosixPath(self.address).name


def list_shards(patterns: Patterns) -> list[Shard]:
    """Return the shards in the order given; the matches of a pattern are sorted. Raises StageError
    if a pattern matches nothing, or a file of a kind that cannot be read."""
    found: dict[str, Shard] = {}
    for pattern in each_pattern(patterns):
        matches = list(_matches(pattern))
        if not matches:
            raise StageError(f"no such file: {pattern}")
        found.update((shard.address, shard) for shard in matches)
    for address in found:
        for problem in kind_problems("shards", address):
            raise StageError(problem.message, hint=problem.hint)
    return list(found.values())


def edges(shards: Iterable[Shard]) -> str:
    """Return the hex digest of the sizes, beginnings and ends of the local shards; remote ones all
    machines read from the same place."""
    found = hashlib.sha256()
    for path in (shard.address for shard in shards if "://" not in shard.address):
        with _access_errors(f"cannot read {path}"), Path(path).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            found.update(f"{size}\0".encode())
            for offset in (0, max(0, size - _EDGE)):
                found.update(os.pread(file.fileno(), _EDGE, offset))
    return found.hexdigest()


def _matches(pattern: str) -> Iterator[Shard]:
    if "://" not in pattern:
        for path in find_files(pattern):
            stat = path.stat()
            yield Shard(address=str(path), size=stat.st_size, stamp=str(stat.st_mtime_ns))
        return
    system, place = _file_system(pattern)
    with _access_errors(f"cannot list {pattern}"):
        for each in sorted(system.glob(place)):
            address, stamp = system.unstrip_protocol(each), str(system.checksum(each))
            yield Shard(address=address, size=int(system.size(each)), stamp=stamp)


def _file_system(address: str) -> tuple[Any, str]:
    """Return the file system of an address, and its place there."""
    with _access_errors(f"{address} cannot be opened"):
        system, place = open_address(address)
    return system, place


@contextlib.contextmanager
def _access_errors(message: str) -> Iterator[None]:
    """Raise errors of a file system, which has classes of its own for them, as StageError."""
    try:
        yield
    except Exception as error:
        raise StageError(f"{message}: {' '.join(in_words(error).split())}") from error


@contextlib.contextmanager
def fetched(shard: Shard, scratch: Path) -> Iterator[Path]:
    """Give the shard as a local file: a copy in `scratch`, removed at the end, if it is remote."""
    if "://" not in shard.address:
        yield Path(shard.address)
        return
    with tempfile.TemporaryDirectory(prefix="shard-", dir=scratch) as folder:
        path = Path(folder) / shard.name
        system, place = _file_system(shard.address)
        with _access_errors(f"cannot read {shard.address}"):
            system.get_file(place, str(path))
        try:
            yield path
        except StageError as error:  # the copy is gone when this is read
            raise StageError(str(error).replace(str(path), shard.address)) from error


class ShardIndex:
    """Digest and number of tokens of each shard that has been read, one line a shard in `file`.

    A resumed run learns from it in which window its position is, without reading earlier shards.
    Only lines with the same `settings` (`Documents.settings_digest`) count.
    """

    def __init__(self, file: Path | None, settings: str, text: str) -> None:
        """`file`: None on ranks that do not write. `text`: from `read_index`."""
        self._file = file
        self._settings = settings
        self._known: dict[str, list[Any]] = json.loads(text)

    def tokens(self, shard: Shard) -> int | None:
        """Return the shard's number of tokens, if it has been read."""
        known = self._known.get(shard.address)
        return known[1] if known else None

    def record(self, shard: Shard, sha256: str, tokens: int) -> None:
        """Record a shard. Raises StageError if an earlier reading found another content, or made
        another number of tokens of it."""
        known = [sha256, tokens]
        before = self._known.setdefault(shard.address, known)
        if before[0] != sha256:
            raise StageError(
                f"{shard.address} is not the file that this run has read before",
                hint="restore it, or start a new run",
            )
        if before != known:
            raise StageError(
                f"{shard.address} has {counted(tokens, 'tokens')} now, and had {before[1]:,} when "
                "this run read it first: earlier versions gave a second begin or end to texts "
                "that have their own",
                hint="continue with the version that began this run, or start a new one",
            )
        if before is known and self._file is not None:
            line = {"making": self._settings, "address": shard.address, "sha256": sha256}
            append_line(self._file, {**line, "tokens": tokens}, sync=True)


def read_index(file: Path, settings: str) -> str:
    """Return the content of a shard index as text for the ShardIndex of every rank."""
    lines = [line for line in read_lines(file) if line.get("making") == settings]
    return json.dumps({line["address"]: [line["sha256"], line["tokens"]] for line in lines})


@dataclass(kw_only=True)
class ShardStore:
    """Blocks of shards by number; the `capacity` shards that were used last are kept.

    Processes of a node share `folder`: a lock for each shard lets one of them tokenise it. The
    first of them removes shards that are no longer kept; a process that still has one open goes on
    reading it.
    """

    shards: Sequence[Shard]
    folder: Path
    documents: Documents
    index: ShardIndex
    capacity: int
    _open: OrderedDict[int, TokenBlocks] = field(default_factory=OrderedDict, init=False)
    _guard: threading.Lock = field(default_factory=threading.Lock, init=False)
    _closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._ahead = ThreadPoolExecutor(1, "pipe-shards")
        self._cleans = self.documents.ctx.dist.local_rank == 0
        with cache_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)

    def count(self, number: int) -> int:
        """Return a shard's number of blocks. Reads the shard if it has never been read."""
        tokens = self.index.tokens(self.shards[number])
        if tokens is None:
            return len(self.blocks(number))
        return block_count(tokens, self.documents.settings.sequence_length)

    def blocks(self, number: int) -> TokenBlocks:
        """Return a shard's blocks. Raises StageError if it cannot be read."""
        with self._guard:
            if number in self._open:
                self._open.move_to_end(number)
                return self._open[number]
        shard, key = self.shards[number], self._key(number)
        with self._locked(key):
            entry = prepare_locally(self.folder, key, lambda folder: self._build(shard, folder))
            sha256 = (entry.folder / _DIGEST).read_text("ascii")
            with self._guard:
                self.index.record(shard, sha256, entry.counts["tokens"])
            tokenize.check_ids(self.documents.model, entry.counts["largest"])
            blocks = self.documents.samples(entry)
        with self._guard:
            self._open[number] = blocks
            old = list(self._open)[: -self.capacity]
            for each in old:
                del self._open[each]
        for key in map(self._key, old if self._cleans else ()):
            with self._locked(key):
                shutil.rmtree(self.folder / key, ignore_errors=True)
        return blocks

    def prepare(self, numbers: Sequence[int]) -> None:
        """Tokenise these shards in a thread. Each process of a node begins at another one, so that
        processes with the same list share the work."""
        dist = self.documents.ctx.dist
        first = len(numbers) * dist.local_rank // dist.local_world_size
        for number in (*numbers[first:], *numbers[:first]):
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._ahead.submit(self._prepare, number)

    def close(self) -> None:
        """End the thread; remove the tokens."""
        self._closed = True
        self._ahead.shutdown(cancel_futures=True)
        if self._cleans:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _prepare(self, number: int) -> None:
        with contextlib.suppress(StageError):  # it is raised where the shard is needed
            self.blocks(number)

    def _build(self, shard: Shard, folder: Path) -> Counts:
        """Tokenise one shard; it may have no text."""
        with fetched(shard, self.folder) as path:
            (folder / _DIGEST).write_text(content_digest(path), "ascii")
            part = LocalFile(path)
            mistakes = Mistakes([part], self.documents.settings.bad_rows)
            documents = self.documents.read([part], mistakes, blank=True)
            counts, first = self.documents.write(folder, self._until_closed(documents))
            mistakes.check(counts["documents"] + mistakes.count)
        for note in [*mistakes.notes(), *formatted(counts, first, mistakes)]:
            self.documents.ctx.log.warning("stream: %s", note.told([shard.address]))
        if not counts["documents"]:
            self.documents.ctx.log.warning("stream: %s has no text", shard.address)
        return counts

    def _until_closed(self, documents: Iterable[Document]) -> Iterator[Document]:
        for document in documents:
            if self._closed:
                raise StageError("the run ends")
            yield document

    def _key(self, number: int) -> str:
        shard = self.shards[number]
        making: list[str | int] = [self.documents.settings_digest]
        making += ["drop"] if self.documents.settings.bad_rows == "drop" else []
        return digest([*making, shard.address, shard.size, shard.stamp])

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Admit one process and thread at a time; the system frees the lock of a killed one."""
        with cache_errors(self.folder):
            file = (self.folder / f"{key}.lock").open("w")
        with file:
            wait_for_lock(file)
            yield

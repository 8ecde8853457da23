"""The tokens of the shards that are at hand on a node: bounded, shared by its processes."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import StageError
from stages.data.cache import Counts, Entry, digest, local_entry, writing
from stages.data.documents import TokenBlocks, windows
from stages.data.streaming.shards import Known, Ledger, Shard, fetched, sha256

_DIGEST = "sha256"
"""File of an entry with the digest of the shard's file."""


@dataclass(frozen=True, kw_only=True)
class Tokeniser:
    """How a file becomes an entry, and an entry blocks."""

    build: Callable[[Shard, Path, Path, Callable[[], bool]], Counts]
    """(shard, its file, folder, whether to stop) -> counts. Writes the entry's files."""
    open: Callable[[Entry], TokenBlocks]
    making: str
    """Digest of what decides which tokens a file becomes."""
    sequence_length: int


class ShardStore:
    """Blocks of shards by number. `capacity` of them are kept, those that were used last.

    Processes of a node share `folder`: a lock a shard lets one of them tokenise it. The one that
    `cleans` removes what is kept no longer; a process that still has it open goes on reading it.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        folder: Path,
        tokeniser: Tokeniser,
        ledger: Ledger,
        *,
        capacity: int,
        cleans: bool,
    ) -> None:
        self._shards = shards
        self._folder = folder
        self._tokeniser = tokeniser
        self._ledger = ledger
        self._capacity = capacity
        self._cleans = cleans
        self._open: OrderedDict[int, TokenBlocks] = OrderedDict()
        self._guard = threading.Lock()
        self._ahead = ThreadPoolExecutor(1, "pipe-shards")
        self._closed = False
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def count(self, number: int) -> int:
        """How many blocks a shard has. Reads the shard if it has never been read."""
        tokens = self._ledger.tokens(self._shards[number])
        if tokens is None:
            return len(self.blocks(number))
        return windows(tokens, self._tokeniser.sequence_length)

    def blocks(self, number: int) -> TokenBlocks:
        """A shard's blocks. Raises StageError when it cannot be read."""
        return self._blocks(number, wait=True)

    def _blocks(self, number: int, *, wait: bool) -> TokenBlocks:
        """Raises BlockingIOError without `wait` where another process or thread is at the shard."""
        with self._guard:
            if number in self._open:
                self._open.move_to_end(number)
                return self._open[number]
        blocks = self._made(number, wait=wait)
        with self._guard:
            self._open[number] = blocks
            old = list(self._open)[: -self._capacity]
            for each in old:
                del self._open[each]
        for each in old:
            self._remove(each)
        return blocks

    def prepare(self, numbers: Sequence[int]) -> None:
        """Have these shards tokenised by a thread, those that another process is at as the last:
        so processes that are given the same list share it."""
        for number in numbers:
            self._submit(number, wait=False)

    def close(self) -> None:
        """End the thread; remove the tokens."""
        self._closed = True
        self._ahead.shutdown(cancel_futures=True)
        if self._cleans:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _submit(self, number: int, *, wait: bool) -> None:
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._ahead.submit(self._prepared, number, wait=wait)

    def _prepared(self, number: int, *, wait: bool) -> None:
        try:
            self._blocks(number, wait=wait)
        except BlockingIOError:
            # It is opened all the same, as only what was opened here is removed from here.
            self._submit(number, wait=True)
        except StageError:
            pass  # it is raised where the shard is needed

    def _made(self, number: int, *, wait: bool) -> TokenBlocks:
        shard, key = self._shards[number], self._key(number)
        with self._locked(key, wait=wait):
            entry = local_entry(self._folder, key, lambda folder: self._build(shard, folder))
            content = (entry.folder / _DIGEST).read_text("ascii")
            known = Known(sha256=content, tokens=entry.counts["tokens"])
            with self._guard:
                self._ledger.enter(shard, known)
            return self._tokeniser.open(entry)

    def _build(self, shard: Shard, folder: Path) -> Counts:
        with fetched(shard, self._folder) as path:
            (folder / _DIGEST).write_text(sha256(shard, path), "ascii")
            try:
                return self._tokeniser.build(shard, path, folder, lambda: self._closed)
            except StageError as error:
                if str(path) == shard.address:
                    raise
                # the copy is gone when this is read
                raise StageError(str(error).replace(str(path), shard.address)) from error

    def _remove(self, number: int) -> None:
        if self._cleans:
            key = self._key(number)
            with self._locked(key, wait=True):
                shutil.rmtree(self._folder / key, ignore_errors=True)

    def _key(self, number: int) -> str:
        shard = self._shards[number]
        return digest([self._tokeniser.making, shard.address, shard.size, shard.stamp])

    @contextlib.contextmanager
    def _locked(self, key: str, *, wait: bool) -> Iterator[None]:
        """One process and thread at a time; the system frees the lock of one that was killed."""
        with writing(self._folder):
            file = (self._folder / f"{key}.lock").open("w")
        with file:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield

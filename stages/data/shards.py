"""Samples of `data.stream`: shards are fetched and tokenised one at a time, a bounded number kept.
The order of samples is a pure function of the seed and of each shard's number of blocks."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import tempfile
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline import ENDLESS, Context, Data, ModelSource, Sample, SampleOrder, StageError, in_words
from pipeline.utils import append_line, counted, open_address, read_lines, wait_for_lock
from stages.data import sources, tokenize
from stages.data.cache import Counts, cache_errors, prepare_locally
from stages.data.documents import DocumentEntries
from stages.data.fields import StreamFields
from stages.data.rows import KNOWN
from stages.data.samples import CountedSamples, Indices, TokenBlocks, block_count
from stages.data.sources import Part, Patterns, Source
from stages.digests import content_digest, digest

INDEX = "stream.jsonl"
"""Shard index in the run's folder."""
WINDOW_BITS, SHARD_BITS, BLOCK_BITS = 23, 20, 20
"""Bits of an index: a window's number, a shard's number, and a block's number in the shard."""
_EDGE = 4096
"""Bytes at each end of a shard by which machines are compared."""
_DIGEST = "sha256"
"""File of an entry with the digest of the shard's file."""


class Shard(NamedTuple):
    """One file of a corpus: its address (a local path, or one that fsspec knows), its size in bytes
    and its version as its file system reports it (a time, an ETag)."""

    address: str
    size: int
    stamp: str


@contextlib.contextmanager
def _access_errors(message: str) -> Iterator[None]:
    """Raise errors of a file system, which has its own classes for them, as StageError."""
    try:
        yield
    except Exception as error:
        raise StageError(f"{message}: {' '.join(in_words(error).split())}") from error


def list_shards(patterns: Patterns) -> list[Shard]:
    """Return the shards in order. Raises StageError if there are none, or of unknown kind."""
    found: dict[str, Shard] = {}
    for pattern in sources.each_pattern(patterns):
        matches = list[Shard]()
        if "://" not in pattern:
            for path in sources.find_files(pattern):
                stat = path.stat()
                matches.append(Shard(str(path), stat.st_size, str(stat.st_mtime_ns)))
        else:
            with _access_errors(f"{pattern} cannot be opened"):
                system, place = open_address(pattern)
            with _access_errors(f"cannot list {pattern}"):
                for each in sorted(system.glob(place)):
                    address, stamp = system.unstrip_protocol(each), str(system.checksum(each))
                    matches.append(Shard(address, int(system.size(each)), stamp))
        if not matches:
            raise StageError(f"no such file: {pattern}")
        found.update((shard.address, shard) for shard in matches)
    for address in found:
        if not address.endswith(KNOWN):
            raise StageError(f"{address}: unknown kind of file", hint=sources.CONVERT)
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


@contextlib.contextmanager
def fetched(shard: Shard, scratch: Path) -> Iterator[Path]:
    """Give the shard as a local file: a copy in `scratch`, removed at the end, if it is remote."""
    if "://" not in shard.address:
        yield Path(shard.address)
        return
    with tempfile.TemporaryDirectory(prefix="shard-", dir=scratch) as folder:
        path = Path(folder) / PurePosixPath(shard.address).name
        with _access_errors(f"{shard.address} cannot be opened"):
            system, place = open_address(shard.address)
        with _access_errors(f"cannot read {shard.address}"):
            system.get_file(place, str(path))
        try:
            yield path
        except StageError as error:  # the copy is gone when this is read
            raise StageError(str(error).replace(str(path), shard.address)) from error


class ShardStore:
    """Blocks of shards by number; the `capacity` shards that were used last are kept.

    The digest and number of tokens of each shard that has been read are one line of INDEX in the
    run's folder, which rank 0 writes. A resumed run learns from it in which window its position is,
    without reading earlier shards. Only lines with the same settings count.

    Processes of a node share `folder`: a lock for each shard lets one of them tokenise it. The
    first of them removes shards that are no longer kept; a process that still has one open
    continues reading it."""

    def __init__(
        self, shards: Sequence[Shard], folder: Path, documents: DocumentEntries, capacity: int
    ) -> None:
        """Open the node's store (collective)."""
        self.shards, self.folder, self.documents = shards, folder, documents
        self._capacity, self._closed = capacity, False
        self._open = OrderedDict[int, TokenBlocks]()
        self._guard = threading.Lock()
        self._ahead = ThreadPoolExecutor(1, "pipe-shards")
        self._cleans = documents.ctx.dist.local_rank == 0
        ctx = documents.ctx
        known = {
            line["address"]: [line["sha256"], line["tokens"]]
            for line in (read_lines(ctx.run_dir / INDEX) if ctx.dist.is_main else ())
            if line.get("making") == documents.settings_digest
        }
        text = ctx.dist.broadcast_str(json.dumps(known) if ctx.dist.is_main else None)
        self._known: dict[str, list[Any]] = json.loads(text)
        with cache_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def count(self, number: int) -> int:
        """Return a shard's number of blocks. Reads the shard if it has never been read."""
        known = self._known.get(self.shards[number].address)
        if known is None:
            return len(self.blocks(number))
        return block_count(known[1], self.documents.settings.sequence_length)

    def blocks(self, number: int) -> TokenBlocks:
        """Return a shard's blocks. Raises StageError if it cannot be read, or if an earlier reading
        found another content or number of tokens."""
        with self._guard:
            if number in self._open:
                self._open.move_to_end(number)
                return self._open[number]
        shard, key = self.shards[number], self._key(number)
        with self._locked(key):
            entry = prepare_locally(self.folder, key, lambda folder: self._build(shard, folder))
            sha256 = (entry.folder / _DIGEST).read_text("ascii")
            tokens = entry.counts["tokens"]
            with self._guard:
                known = [sha256, tokens]
                before = self._known.setdefault(shard.address, known)
                if before[0] != sha256:
                    raise StageError(
                        f"{shard.address} is not the file that this run has read before",
                        hint="restore it, or start a new run",
                    )
                if before != known:
                    raise StageError(
                        f"{shard.address} has {counted(tokens, 'tokens')} now, and had "
                        f"{before[1]:,} when this run read it first: earlier versions gave a "
                        "second begin or end to texts that have their own",
                        hint="continue with the version that began this run, or start a new one",
                    )
                ctx, making = self.documents.ctx, self.documents.settings_digest
                if before is known and ctx.dist.is_main:
                    line = {"making": making, "address": shard.address, "sha256": sha256}
                    append_line(ctx.run_dir / INDEX, line | {"tokens": tokens}, sync=True)
            tokenize.check_ids(self.documents.model, entry.counts["largest"])
            blocks = self.documents.samples(entry)
        with self._guard:
            self._open[number] = blocks
            old = list(self._open)[: -self._capacity]
            for each in old:
                del self._open[each]
        for key in map(self._key, old if self._cleans else ()):
            with self._locked(key):
                shutil.rmtree(self.folder / key, ignore_errors=True)
        return blocks

    def prepare(self, numbers: Sequence[int]) -> None:
        """Tokenise shards in a thread; processes of a node begin at others, to share the work."""
        dist = self.documents.ctx.dist
        first = len(numbers) * dist.local_rank // dist.local_world_size
        for number in (*numbers[first:], *numbers[:first]):
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._ahead.submit(self.blocks, number)  # which raises where the shard is needed

    def close(self) -> None:
        """End the thread; remove the tokens."""
        self._closed = True
        self._ahead.shutdown(cancel_futures=True)
        if self._cleans:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _build(self, shard: Shard, folder: Path) -> Counts:
        """Tokenise one shard; it may have no text."""
        log = self.documents.ctx.log
        with fetched(shard, self.folder) as path:
            (folder / _DIGEST).write_text(content_digest(path), "ascii")
            counts, notes = self.documents.tokenise(
                [Part(path)],
                folder,
                blank=True,
                watch=lambda documents: itertools.takewhile(lambda _: not self._closed, documents),
            )
        if self._closed:
            raise StageError("the run ends")
        for note in notes:
            log.warning("stream: %s", note.told([shard.address]))
        if not counts["documents"]:
            log.warning("stream: %s has no text", shard.address)
        return counts

    def _key(self, number: int) -> str:
        shard, drops = self.shards[number], self.documents.settings.bad_rows == "drop"
        making = [self.documents.settings_digest, *(["drop"] if drops else [])]
        return digest([*making, shard.address, shard.size, shard.stamp])

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Admit one process and thread at a time; the system frees the lock of a killed one."""
        with cache_errors(self.folder):
            file = (self.folder / f"{key}.lock").open("w")
        with file:
            wait_for_lock(file)
            yield


def located(index: int) -> tuple[int, int, int]:
    """Return what an index encodes: the window that a block is read for, its shard, its number."""
    rest, block = divmod(index, 1 << BLOCK_BITS)
    return *divmod(rest, 1 << SHARD_BITS), block


class StreamOrder:
    """Windows of shards, one after the other, epoch after epoch.

    Epoch e visits the shards in the order of epoch e of SampleOrder, `window` at a time; the last
    window of an epoch may have fewer. Within window number g, counted over all epochs, blocks come
    in the order of epoch g of a SampleOrder. Without `shuffle` both are in their stored order.
    """

    size = ENDLESS

    def __init__(
        self, seed: int, *, shuffle: bool, shards: int, window: int, count: Callable[[int], int]
    ) -> None:
        """`count` returns a shard's number of blocks, which may need reading it. Raises StageError
        if there are more shards than an index can number."""
        _require(shards, SHARD_BITS, "shards")
        self._seed, self._shuffle, self._count = seed, shuffle, count
        self._shards = SampleOrder(seed, shards, shuffle=shuffle)
        self._window, self._windows = window, -(-shards // window)
        self._starts = [0]
        """First position of each window so far, and of the next."""

    def indices(self, start: int, count: int) -> NDArray[np.int64]:
        """Return the indices of positions start ... start + count - 1; shape (count,)."""
        pieces = [np.empty(0, dtype=np.int64)]
        while count > 0:
            while self._starts[-1] <= start:
                number = len(self._starts) - 1
                self._starts.append(self._starts[-1] + sum(map(self._count, self.members(number))))
                if number + 1 == self._windows and not self._starts[-1]:
                    raise StageError("no shard has two tokens of text")
            number = bisect_right(self._starts, start) - 1
            taken = min(count, self._starts[number + 1] - start)
            _require(number + 1, WINDOW_BITS, "windows")
            members = np.array(self.members(number), dtype=np.int64)
            sizes = map(self._count, members.tolist())
            firsts = np.array([0, *itertools.accumulate(sizes)], dtype=np.int64)
            size = int(firsts[-1])
            _require(int(np.diff(firsts).max()), BLOCK_BITS, "blocks in a shard")
            order = SampleOrder(self._seed, size, shuffle=self._shuffle)
            places = order.indices(number * size + start - self._starts[number], taken)
            which = np.searchsorted(firsts, places, side="right") - 1
            shards = (number << SHARD_BITS) | members[which]
            pieces.append((shards << BLOCK_BITS) | (places - firsts[which]))
            start, count = start + taken, count - taken
        return np.concatenate(pieces)

    def members(self, number: int) -> list[int]:
        """Return the shards of a window."""
        epoch, place = divmod(number, self._windows)
        first, count = place * self._window, self._shards.size
        size = min(self._window, count - first)
        members: list[int] = self._shards.indices(epoch * count + first, size).tolist()
        return members


def _require(count: int, bits: int, what: str) -> None:
    if count > 1 << bits:
        raise StageError(f"{count} {what} are more than the {1 << bits} that a stream can have")


class StreamSamples(CountedSamples):
    """Blocks of all shards, by what an index encodes. Reading a block of a window prepares the
    `ahead` windows after it."""

    def __init__(self, store: ShardStore, window: int, ahead: int) -> None:
        self._store, self._window, self._ahead = store, window, ahead
        self._order: StreamOrder | None = None
        self._prepared = 0
        """First window that has not been prepared."""

    def __len__(self) -> int:
        raise StageError(
            "the number of samples of a stream is not known",
            hint="give the train slot `steps` instead of `epochs`",
        )

    def __getitem__(self, index: int) -> Sample:
        return self._blocks(index)[located(index)[2]]

    def _blocks(self, index: int) -> TokenBlocks:
        window, shard, _ = located(index)
        after = window + 1 + self._ahead
        if self._order is not None:
            for each in range(max(self._prepared, window + 1), after):
                self._store.prepare(self._order.members(each))
        self._prepared = max(self._prepared, after)
        return self._store.blocks(shard)

    def counted(self, indices: Indices) -> Indices:
        # By the index of the first block of each shard and window.
        firsts, which = np.unique(indices >> BLOCK_BITS << BLOCK_BITS, return_inverse=True)
        counts = np.zeros(2, np.int64)
        for number, first in enumerate(firsts.tolist()):
            counts += self._blocks(first).counted(indices[which == number] - first)
        return counts

    def order(self, seed: int, *, shuffle: bool) -> StreamOrder:
        self._prepared = 0
        self._order = StreamOrder(
            seed,
            shuffle=shuffle,
            shards=len(self._store.shards),
            window=self._window,
            count=self._store.count,
        )
        return self._order


def stream_data(fields: StreamFields, ctx: Context, model: ModelSource) -> Data:
    """Return the data of `data.stream` (collective)."""
    # one worker, this thread: processes must not be forked in the middle of training
    documents = DocumentEntries(fields, fields.cache, 1, ctx, model)
    main = ctx.dist.is_main
    text = json.dumps(list_shards(fields.shards)) if main else None
    listed = [Shard(*each) for each in json.loads(ctx.dist.broadcast_str(text))]
    ctx.dist.require_same("shards", {"their sizes, beginnings and ends": edges(listed)})
    place = digest([str(ctx.run_dir.resolve()), ctx.slot])
    folder = documents.cache / f"stream-{place[:16]}"
    store = ShardStore(listed, folder, documents, capacity=(fields.ahead + 2) * fields.window)
    ctx.on_exit(store.close)
    ctx.log.info("stream: %d shards, %d bytes", len(listed), sum(each.size for each in listed))
    held = None
    identity: dict[str, str | int | float | None] = {
        "stage": "data.stream",
        "contents": digest([[PurePosixPath(each.address).name, each.size] for each in listed]),
        "window": fields.window,
        "text_key": fields.text_key,
        **documents.settings_identity,
    }
    if fields.heldout_files:
        (entry,) = documents.open([Source(files=fields.heldout_files)])
        held = documents.samples(entry)
        identity["heldout"] = documents.content(entry)
    return Data(
        train=StreamSamples(store, fields.window, fields.ahead),
        heldout=held,
        pad_id=tokenize.pad_id(documents.tokenizer),
        packed=fields.documents_apart,
        identity=identity,
    )

"""The shards of a stream: listed, and brought here one at a time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.errors import DataError, StageError, in_words
from pipeline.utils import jsonl
from stages.data import files


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of a corpus, wherever it is."""

    address: str
    """A local path, or what fsspec knows."""
    size: int
    """Bytes."""
    stamp: str
    """What changes when the file is written anew, as its file system tells it (a time, an
    ETag)."""

    @property
    def name(self) -> str:
        """The file's own name."""
        return PurePosixPath(self.address).name

    def as_json(self) -> dict[str, Any]:
        """For `Shard(**...)` on another rank."""
        return asdict(self)


def listed(patterns: files.Patterns) -> list[Shard]:
    """The shards in the order given, a pattern's in sorted order. Raises StageError when a pattern
    matches nothing, or something that cannot be read."""
    found: dict[str, Shard] = {}
    for pattern in files.each(patterns):
        matches = list(_matches(pattern))
        if not matches:
            raise StageError(f"no such file: {pattern}")
        found.update((shard.address, shard) for shard in matches)
    for shard in found.values():
        if not shard.name.endswith(files.KNOWN):
            known = "known: " + " ".join(files.KNOWN)
            raise StageError(f"{shard.address}: unknown kind of file", hint=known)
    return list(found.values())


def _matches(pattern: str) -> Iterator[Shard]:
    if "://" not in pattern:
        for path in files.expand(pattern):
            yield _shard(*_system(str(path)), str(path))
        return
    system, place = _system(pattern)
    try:
        for each in sorted(system.glob(place)):
            yield _shard(system, each, system.unstrip_protocol(each))
    except Exception as error:  # every file system has its own
        raise StageError(f"cannot list {pattern}: {_words(error)}") from error


def _shard(system: Any, place: str, address: str) -> Shard:
    return Shard(
        address=address, size=int(system.size(place)), stamp=str(system.checksum(place))
    )  # fmt: skip


def _system(address: str) -> tuple[Any, str]:
    """The file system of an address, and its place there."""
    from fsspec.core import url_to_fs

    try:
        system, place = url_to_fs(address)
    except Exception as error:
        raise StageError(f"{address} cannot be opened: {_words(error)}") from error
    return system, place


@contextlib.contextmanager
def fetched(shard: Shard, scratch: Path) -> Iterator[Path]:
    """The shard as a local file, for the time of the body; in `scratch` if it is elsewhere."""
    if "://" not in shard.address:
        yield Path(shard.address)
        return
    with tempfile.TemporaryDirectory(prefix="shard-", dir=scratch) as folder:
        path = Path(folder) / shard.name
        system, place = _system(shard.address)
        try:
            system.get_file(place, str(path))
        except Exception as error:
            raise StageError(f"cannot read {shard.address}: {_words(error)}") from error
        yield path


def sha256(shard: Shard, path: Path) -> str:
    """Hex digest of the shard's content, which is in the file `path`. Raises DataError when that
    cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", file=shard.address) from error


def _words(error: Exception) -> str:
    return " ".join(in_words(error).split())


def dump(shards: Sequence[Shard]) -> list[dict[str, Any]]:
    """JSON of a list of shards."""
    return [shard.as_json() for shard in shards]


@dataclass(frozen=True, kw_only=True)
class Known:
    """A shard that has been tokenised once."""

    sha256: str
    """Of the file as it is stored."""
    tokens: int


class Ledger:
    """How many tokens each shard has, in `file`, one line a shard; an address and a way of making
    tokens (`making`, a digest) tell the lines apart.

    A run that resumes at some position learns from it in which window that is, without reading
    what came before.
    """

    def __init__(self, file: Path | None, making: str, text: str = "{}") -> None:
        self._file = file
        self._making = making
        self._known = {address: Known(**each) for address, each in json.loads(text).items()}

    @classmethod
    def read(cls, file: Path, making: str) -> str:
        """What the file knows, as text for other ranks' `Ledger`."""
        known = {
            record["address"]: {"sha256": record["sha256"], "tokens": record["tokens"]}
            for record in jsonl.read(file)
            if record.get("making") == making
        }
        return json.dumps(known)

    def tokens(self, shard: Shard) -> int | None:
        """The shard's tokens, if it has been read."""
        known = self._known.get(shard.address)
        return known.tokens if known else None

    def enter(self, shard: Shard, known: Known) -> None:
        """Note what was read. Raises StageError when it is not what was read before."""
        before = self._known.get(shard.address)
        if before is not None and before != known:
            raise StageError(
                f"{shard.address} is not the file that this run has read before",
                hint="restore it, or start a new run",
            )
        if before is None:
            self._known[shard.address] = known
            if self._file is not None:
                record = {"making": self._making, "address": shard.address, **vars(known)}
                jsonl.append(self._file, record, sync=True)

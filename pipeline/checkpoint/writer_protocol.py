"""Messages between a rank and its writer, each one line of JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel

from pipeline.checkpoint.manifest import ManifestTemplate
from pipeline.checkpoint.retention import Retention
from pipeline.checkpoint.tiles import Extent


class NewFile(BaseModel):
    """A file that a rank writes: all of it, or with `shared` its own pieces and, on rank 0, the
    header."""

    name: str
    size: int
    shared: bool


class Write(NamedTuple):
    """`size` bytes of the snapshot buffer, from byte `start` on: those from byte `begin` on of a
    piece of file number `file`. `piece` is false for headers, which have no block checksums."""

    file: int
    extent: Extent
    begin: int
    start: int
    size: int
    piece: bool


class WriterSetup(BaseModel):
    """Constants of one rank's writer."""

    store: str
    rank: int
    world_size: int
    buffer_size: int
    """Bytes of the snapshot buffer."""
    files: Sequence[NewFile]
    rounds: Sequence[Sequence[Write]]
    """File by file, each from its start to its end."""
    template: ManifestTemplate | None
    """Rank 0 only."""
    retention: Retention


class SaveRequest(BaseModel):
    """Order to write one checkpoint."""

    name: str
    identity: str
    began: float
    """Time of the monotonic clock at which the save began."""
    facts: Mapping[str, Any] = {}
    """Fields `step`, `progress` and `state` of the manifest, on rank 0 only."""


class SaveResult(BaseModel):
    """Answer of a writer to its rank, and report to the writer of rank 0, in the transaction."""

    name: str
    problem: str = ""
    digest: int = 0
    """Digest of the rank's checksums."""
    place: str = ""
    size: int = 0
    """Bytes of the whole checkpoint's data, on rank 0."""
    seconds: float = 0.0
    """From the beginning of the save until the checkpoint was on disk, on rank 0."""
    ended: float = 0.0
    """Seconds since 1970 at which that was so."""
    user_seconds: float = 0.0
    """Processor time of this writer for the save; on rank 0 of all ranks' writers."""
    system_seconds: float = 0.0
    warnings: Sequence[str] = ()

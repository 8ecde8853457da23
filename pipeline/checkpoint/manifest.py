"""The manifest of a checkpoint: its content, places and checksums, in `manifest.json`.

The file is JSON: `{"checkpoint": BODY, "sha256": "..."}`, the digest being of BODY's bytes as they
stand in the file.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict, PlainSerializer

from pipeline.checkpoint.block_sums import BLOCK
from pipeline.checkpoint.division import (
    Count,
    CoverageError,
    Positive,
    Run,
    require_whole,
    row_lengths,
)
from pipeline.checkpoint.safetensors_format import ITEM_BYTES
from pipeline.contracts.engine import WEIGHT, EngineState
from pipeline.errors import CheckpointError

MANIFEST = "manifest.json"
LARGEST = 1 << 42
"""Limit of a tensor's elements: a tensor's number and an element's make a 64-bit key."""
_FLAT = (0, 1, 0)
"""Last fields of a run without columns."""
_NAME = re.compile(r"(?!\.)[\w.-]+(/(?!\.)[\w.-]+)*", re.ASCII)


class Damaged(CheckpointError):
    """Bytes on disk differ from those that were written; another checkpoint may still be good."""

    key = ""
    """Tensor that could not be read, if it is known."""


class Piece(NamedTuple):
    """Elements [start, stop) of tensor number `tensor`, at byte `offset` of file number `file`."""

    tensor: Count
    file: Count
    offset: Count
    start: Count
    stop: Count


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class TensorEntry(_Model):
    """A logical tensor; `dtype` as the safetensors format names it."""

    key: str
    dtype: str
    shape: tuple[Count, ...]
    file: Count | None = None
    """Number of the file that holds all of it; None: each part is in its rank's file."""

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.itemsize


class DataFile(_Model):
    """A file of pieces. The first `data_start` bytes have the digest `header` (XXH3, 64 bits)."""

    name: str
    size: Count
    data_start: Count
    header: Count


class RankShare(_Model):
    """The share of one rank: `sums` is the file with the block checksums of its pieces, piece after
    piece, and `digest` that file's XXH3 (64 bits)."""

    sums: str
    digest: Count
    pieces: Sequence[Piece] = ()
    """All pieces, in version 1; later ones follow from `Manifest.runs`."""


def _written(runs: Sequence[Sequence[Run]]) -> list[list[tuple[int, ...]]]:
    """Runs as they are stored: without the fields for columns, where there are none."""
    return [[run if run.width else run[:7] for run in own] for own in runs]


_Runs = Annotated[Sequence[Sequence[Run]], PlainSerializer(_written)]


class Manifest(_Model):
    """A whole checkpoint."""

    version: Literal[1, 2, 3] = 2
    """3 if a tensor is divided by columns or in units of rows, which earlier releases do not
    know."""
    step: Annotated[int, Ge(0), Le(10**18)]
    written: str
    """Date and time, ISO 8601."""
    world_size: Positive
    writer: Mapping[str, Any]
    """The engine's facts and the versions of its packages; for people."""
    progress: Mapping[str, Any]
    state: EngineState
    block: Literal[16384] = BLOCK
    tensors: Sequence[TensorEntry]
    runs: _Runs = ()
    """Division of each tensor among ranks; empty in version 1."""
    files: Sequence[DataFile]
    parts: Sequence[RankShare]
    """Parts by rank. Where tensors do not lie whole in files, file number N is that of part number
    N."""

    def dump(self) -> bytes:
        """Bytes of the file."""
        return _framed(self.model_dump_json().encode())

    @classmethod
    def load(cls, data: bytes, where: str) -> Manifest:
        """Verify and parse the file's bytes. Raises Damaged, naming `where`, for anything that
        `dump` did not write."""
        frame = _framed(b"")
        head = frame.index(b",")
        body = data[head : head + max(len(data) - len(frame), 0)]
        if data != _framed(body):
            raise Damaged(f"{where}: its checksum is wrong: damaged, edited or incomplete")
        try:
            manifest = cls.model_validate_json(body, strict=True)
        except pydantic.ValidationError as error:
            problem = error.errors(include_url=False)[0]
            place = ".".join(map(str, problem["loc"]))
            raise CheckpointError(
                f"{where}: written by another version: {place}: {problem['msg']}"
            ) from None
        manifest._require_sense(where)
        return manifest

    def digest(self) -> str:
        """Hex digest of what was saved, without the progress, which may be amended, and the names
        of files, which are chosen at random."""
        saved = self.model_dump_json(include={"step", "state", "tensors", "runs"})
        sums = [[part.digest, part.pieces] for part in self.parts]
        return hashlib.sha256(f"{saved} {sums}".encode()).hexdigest()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shapes of parameters and stored buffers, by name."""
        kinds = ((*tensor.key.partition("/"), tensor.shape) for tensor in self.tensors)
        return {name: shape for kind, _, name, shape in kinds if kind == WEIGHT}

    def division(self) -> list[list[Run]]:
        """`runs` in order; of version 1, each listed piece as a run of its own."""
        if self.version != 1:
            return [sorted(own) for own in self.runs]
        runs: list[list[Run]] = [[] for _ in self.tensors]
        for rank, part in enumerate(self.parts):
            for piece in part.pieces:
                length = piece.stop - piece.start
                runs[piece.tensor].append(Run(piece.start, piece.stop, length, rank))
        return [sorted(own) for own in runs]

    def _require_sense(self, where: str) -> None:
        """Names stay inside the folder, pieces inside their files; see also `_require_division`."""
        names = [*(file.name for file in self.files), *(part.sums for part in self.parts)]
        for name in names:
            if not _NAME.fullmatch(name):
                raise Damaged(f"{where}: names a file outside of its folder: {name!r}")
        repeated = Counter([*names, *(tensor.key for tensor in self.tensors)])
        for name, count in repeated.items():
            if count > 1:
                raise Damaged(f"{where}: has two entries for {name}")
        for file in self.files:
            if file.data_start > file.size:
                raise Damaged(f"{where}: {file.name}: its header is longer than the file")
        for tensor in self.tensors:
            self._require_tensor(tensor, where)
        for piece in itertools.chain(*(part.pieces for part in self.parts)):
            known = piece.tensor < len(self.tensors) and piece.file < len(self.files)
            if not known or piece.start >= piece.stop:
                raise Damaged(f"{where}: a piece of an unknown tensor or file")
        self._require_division(where)

    def _require_division(self, where: str) -> None:
        """Every tensor is whole, and divided as its shape and the version can be."""
        if self.version != 1 and len(self.runs) != len(self.tensors):
            raise Damaged(f"{where}: does not say which rank has which tensor")
        if self.version < 3 and any(run[7:] != _FLAT for own in self.runs for run in own):
            raise Damaged(f"{where}: is divided in a way that its version does not have")
        numels = {tensor.key: tensor.numel for tensor in self.tensors}
        try:
            require_whole(self.division(), numels, len(self.parts))
        except CoverageError as error:
            raise Damaged(f"{where}: {error}") from None
        for tensor, own in zip(self.tensors, self.runs, strict=False):
            if not {run.stride for run in own} <= {0, *row_lengths(tensor.shape)}:
                raise Damaged(f"{where}: {tensor.key}: is divided by columns of other rows")

    def _require_tensor(self, tensor: TensorEntry, where: str) -> None:
        if tensor.dtype not in ITEM_BYTES:
            raise CheckpointError(f"{where}: {tensor.key} has the unknown dtype {tensor.dtype}")
        if tensor.numel >= LARGEST:
            raise Damaged(f"{where}: {tensor.key}: {tensor.numel} elements")
        in_parts = self.version != 1 and tensor.file is None
        known = len(self.files) == len(self.parts) if in_parts else True
        if not known or (tensor.file or 0) >= len(self.files):
            raise Damaged(f"{where}: {tensor.key}: lies in an unknown file")


class ManifestTemplate(BaseModel):
    """The part of the manifest that is the same at every save of a run."""

    world_size: int
    writer: Mapping[str, Any]
    tensors: Sequence[TensorEntry]
    runs: _Runs
    files: Sequence[DataFile]

    def fill(self, facts: Mapping[str, Any], prefix: str, digests: Sequence[int]) -> Manifest:
        """The manifest of one save, given its `step`, `progress` and `state`, the prefix of its
        files' names, and the digest of each writing rank's checksums."""
        named = [file.model_copy(update={"name": prefix + file.name}) for file in self.files]
        parts = [
            RankShare(sums=prefix + sums_name(rank), digest=digest)
            for rank, digest in enumerate(digests)
        ]
        written = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        version = 3 if any(run.width for own in self.runs for run in own) else 2
        same = dict(self) | {"files": named, "version": version}
        return Manifest(**facts, **same, written=written, parts=parts)


def _framed(body: bytes) -> bytes:
    digest = hashlib.sha256(body).hexdigest().encode()
    return b'{"checkpoint": ' + body + b', "sha256": "' + digest + b'"}\n'


def sums_name(rank: int) -> str:
    """Name of the file with a rank's checksums."""
    return f"rank-{rank:05d}.sums"

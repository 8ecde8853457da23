"""The manifest of a checkpoint, `manifest.json`: its content, places and checksums.

The file is JSON: `{"checkpoint": BODY, "sha256": "..."}`, the digest is of BODY's bytes as they
stand in the file."""

from __future__ import annotations

import datetime
import functools
import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

import pydantic
from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict, PlainSerializer

from pipeline.checkpoint.division import Count, CoverageError, Division, Piece, Positive
from pipeline.contracts.engine import EngineState
from pipeline.errors import CheckpointError

MANIFEST = "manifest.json"
SUMS = "rank-{:05d}.sums"
"""Name of the file with a rank's checksums."""
BLOCK: Final = 16384
"""Bytes of a block. Blocks count from the start of their piece; the last may be short."""
ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2,
    "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of one element, by the format's name of the dtype."""
MAX_ELEMENTS = 1 << 42
"""Limit of a tensor's elements: its number and an element's make a 64-bit key (`reader`)."""
_FRAME = b'{"checkpoint": %b, "sha256": "%b"}\n'
"""A body, and the digest of its bytes."""
_NAME = re.compile(r"(?!\.)[\w.-]+(/(?!\.)[\w.-]+)*", re.ASCII)


class Damaged(CheckpointError):
    """Bytes on disk differ from the bytes that were written; another checkpoint may still be
    good."""

    key = ""
    """Tensor that could not be read, if it is known."""


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
        """Number of elements."""
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


class PlacedPiece(NamedTuple):
    """Version 1: elements [start, stop) of a tensor, at byte `offset` of a file, by numbers."""

    tensor: Count
    file: Count
    offset: Count
    start: Count
    stop: Count


class RankShare(_Model):
    """The share of one rank: `sums` is the file with the block checksums of its pieces, piece after
    piece, and `digest` that file's XXH3 (64 bits)."""

    sums: str
    digest: Count
    pieces: Sequence[PlacedPiece] = ()
    """All pieces, in version 1."""


class Run(NamedTuple):
    """Versions 2 and 3: elements [start, stop) of a tensor in parts of `length`, on ranks `rank`,
    `rank + step`, ...; each part again in `cuts` equal parts on ranks that are `apart`.

    With a `width` the tensor is rows of that many elements, which parts and cuts do not divide;
    each cut is divided by columns into `bands` on ranks that are `across`. If `start` and `stop`
    are within rows, they bound the columns.
    """

    start: Count
    stop: Count
    length: Positive
    rank: Count
    step: Count = 0
    cuts: Positive = 1
    apart: Count = 0
    width: Count = 0
    bands: Positive = 1
    across: Count = 0

    def pieces(self, ranks: int) -> list[Piece]:
        """The pieces in order. Raises CoverageError unless their ranks differ and exist."""
        unit = self.width or 1
        first, rows = self.start // unit, (self.stop - 1) // unit - self.start // unit + 1
        left, right = self.start % unit, (self.stop - 1) % unit + 1
        if left >= right:
            raise CoverageError("has a part without columns")
        part = max(self.length // unit, 1)
        parts, cut, band = -(-rows // part), -(-part // self.cuts), -(-(right - left) // self.bands)
        strides = (self.step, parts), (self.apart, self.cuts), (self.across, self.bands)
        known = all((stride > 0) == (many > 1) for stride, many in strides)
        known &= 0 < parts * self.cuts * self.bands <= ranks and self.bands <= right - left
        known &= self.length % unit == 0 and self.length <= rows * unit
        found = []
        numbers = (parts, self.cuts, self.bands) if known else (0,) * 3
        for number, cut_number, band_number in itertools.product(*map(range, numbers)):
            top = number * part + cut_number * cut
            bottom = min(top + cut, (number + 1) * part, rows)
            low, high = left + band_number * band, min(left + (band_number + 1) * band, right)
            if top < bottom and low < high:
                rank = self.rank + number * self.step + cut_number * self.apart
                rank, begin = rank + band_number * self.across, (first + top) * unit
                if self.bands == 1 and right - left == unit:
                    found.append(Piece(rank, begin, begin + (bottom - top) * unit))
                else:
                    found.append(Piece(rank, begin + low, begin + high, unit, bottom - top))
        own = {piece.rank for piece in found}
        if not found or len(own) < len(found) or max(own) >= ranks:
            raise CoverageError("divided among ranks that do not exist")
        return found


_Runs = Annotated[
    Sequence[Sequence[Run]],
    PlainSerializer(lambda all: [[run if run.width else run[:7] for run in own] for own in all]),
]


class Manifest(_Model):
    """A whole checkpoint."""

    version: Literal[1, 2, 3, 4] = 4
    """Releases before 4 state the division by rules (`runs`), or list it with each rank's share."""
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
    """Versions 2 and 3: division of each tensor."""
    division: Division | None = None
    """Version 4: division of all tensors."""
    files: Sequence[DataFile]
    parts: Sequence[RankShare]
    """Parts by rank. Where tensors are not whole in files, file number N belongs to part number
    N."""

    def dump(self) -> bytes:
        """Bytes of the file."""
        absent: Any = {"runs": True, "parts": {"__all__": {"pieces"}}}
        absent = absent if self.version == 4 else {"division"}
        body = self.model_dump_json(exclude=absent).encode()
        return _FRAME % (body, hashlib.sha256(body).hexdigest().encode())

    @classmethod
    def load(cls, data: bytes, where: str) -> Manifest:
        """Verify and parse the file's bytes. Raises Damaged, naming `where`, or CheckpointError."""
        head = _FRAME.index(b"%b")
        body = data[head : head + max(len(data) - len(_FRAME % (b"", b"0" * 64)), 0)]
        if data != _FRAME % (body, hashlib.sha256(body).hexdigest().encode()):
            raise Damaged(f"{where}: its checksum is wrong: damaged, edited or incomplete")
        try:
            manifest = cls.model_validate_json(body, strict=True)
        except pydantic.ValidationError as error:
            problem = error.errors(include_url=False)[0]
            place = ".".join(map(str, problem["loc"]))
            raise CheckpointError(
                f"{where}: written by another version: {place}: {problem['msg']}"
            ) from None
        for tensor in manifest.tensors:
            if tensor.dtype not in ITEM_BYTES:
                raise CheckpointError(f"{where}: {tensor.key} has the unknown dtype {tensor.dtype}")
        for found in manifest._problems():
            raise Damaged(f"{where}: {found}")
        return manifest

    def digest(self) -> str:
        """Hex digest of what was saved, without progress and the random names of files."""
        division = "division" if self.version == 4 else "runs"
        saved = self.model_dump_json(include={"step", "state", "tensors", division})
        sums = str([[part.digest, part.pieces] for part in self.parts])
        sums = sums.replace("PlacedPiece(", "Piece(")  # as the releases of version 1 have it
        return hashlib.sha256(f"{saved} {sums}".encode()).hexdigest()

    @functools.cached_property
    def divided(self) -> Division:
        """The division of the tensors, whatever the version. Raises CoverageError."""
        if self.division is not None:
            return self.division
        pieces: list[list[Piece]] = [[] for _ in self.tensors]
        for rank, part in enumerate(self.parts):
            for placed in part.pieces:
                pieces[placed.tensor].append(Piece(rank, placed.start, placed.stop))
        for number, own in enumerate(self.runs):
            try:
                pieces[number] += [p for run in sorted(own) for p in run.pieces(len(self.parts))]
            except CoverageError as error:
                raise CoverageError(f"{self.tensors[number].key}: {error}") from None
        return Division.of(pieces)

    def _problems(self) -> Iterator[str]:
        """Yield the mistakes, which `dump` never writes: names that lead out of the folder, pieces
        out of their files, tensors that are not whole."""
        names = [*(file.name for file in self.files), *(part.sums for part in self.parts)]
        foreign_names = (name for name in names if not _NAME.fullmatch(name))
        yield from (f"names a file outside of its folder: {name!r}" for name in foreign_names)
        entries = Counter([*names, *(tensor.key for tensor in self.tensors)]).items()
        yield from (f"has two entries for {name}" for name, count in entries if count > 1)
        headless = (file for file in self.files if file.data_start > file.size)
        yield from (f"{file.name}: its header is longer than the file" for file in headless)
        for tensor in self.tensors:
            if tensor.numel >= MAX_ELEMENTS:
                yield f"{tensor.key}: {tensor.numel} elements"
            in_parts = self.version != 1 and tensor.file is None
            known = not in_parts or len(self.files) == len(self.parts)
            if not known or (tensor.file or 0) >= len(self.files):
                yield f"{tensor.key}: lies in an unknown file"
        listed_pieces = list(itertools.chain(*(part.pieces for part in self.parts)))
        for number, file, _, start, stop in listed_pieces:
            if number >= len(self.tensors) or file >= len(self.files) or start >= stop:
                yield "a piece of an unknown tensor or file"
        listed = self.runs if self.division is None else self.division.tensors
        known = len(listed) == len(self.tensors) or self.version == 1
        if not known or (self.division is None) == (self.version == 4):
            yield "does not say which rank has which tensor"
        columns = any(run[7:] != (0, 1, 0) for own in self.runs for run in own)
        foreign = {1: columns or self.runs, 2: columns or listed_pieces, 3: listed_pieces}
        if foreign.get(self.version, self.runs or listed_pieces):
            yield "is divided in a way that its version does not have"
        try:
            shapes = {tensor.key: tensor.shape for tensor in self.tensors}
            self.divided.require_whole(shapes, len(self.parts))
        except CoverageError as error:
            yield str(error)


class ManifestTemplate(BaseModel):
    """The part of the manifest that is the same at every save of a run."""

    world_size: int
    writer: Mapping[str, Any]
    tensors: Sequence[TensorEntry]
    division: Division
    files: Sequence[DataFile]

    def fill(self, facts: Mapping[str, Any], prefix: str, digests: Sequence[int]) -> Manifest:
        """The manifest of one save, given its `step`, `progress` and `state`, the prefix of its
        files' names, and the digest of each writing rank's checksums."""
        files = [file.model_copy(update={"name": prefix + file.name}) for file in self.files]
        parts = [
            RankShare(sums=prefix + SUMS.format(rank), digest=digest)
            for rank, digest in enumerate(digests)
        ]
        written = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return Manifest(**facts, **dict(self) | {"files": files}, written=written, parts=parts)

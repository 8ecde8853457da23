"""What a checkpoint holds, where it lies and what verifies it: `manifest.json`.

The file is JSON: `{"checkpoint": BODY, "sha256": "..."}`, the digest being of BODY's bytes as they
stand in the file.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict, Field

from pipeline.checkpoint import safetensors_format
from pipeline.checkpoint.division import LARGEST, Count, CoverageError, Division, Run, require_cover
from pipeline.checkpoint.safetensors_format import ITEM_BYTES
from pipeline.errors import CheckpointError

FILE = "manifest.json"
FIRST_SUMS = "rank-00000.sums"
"""In every checkpoint in a folder; who finds it without a manifest has lost the manifest."""
_HEAD = b'{"checkpoint": '
_MIDDLE = b', "sha256": "'
_TAIL = b'"}\n'
_DIGEST = 64
_NAME = re.compile(r"(?!\.)[\w.-]+(/(?!\.)[\w.-]+)*", re.ASCII)


class Damaged(CheckpointError):
    """What is on disk is not what was written; another checkpoint may still be good.

    `key` is the tensor that could not be read, if it is known.
    """

    def __init__(self, message: str, *, key: str = "", hint: str = "") -> None:
        self.key = key
        super().__init__(message, hint=hint)


class Piece(NamedTuple):
    """Elements [start, stop) of tensor number `tensor`, at byte `offset` of file number `file`.
    Version 1 lists them all; later ones say them by rule (`places.py`)."""

    tensor: Count
    file: Count
    offset: Count
    start: Count
    stop: Count


class _Model(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, ser_json_inf_nan="constants"
    )


class TensorEntry(_Model):
    """A logical tensor; `dtype` as the safetensors format names it."""

    key: str
    dtype: str
    shape: tuple[Count, ...]
    file: Count | None = None
    """Number of the file that it lies in whole; else each part is in its rank's file."""

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEM_BYTES[self.dtype]


class DataFile(_Model):
    """A file of pieces. The first `data_start` bytes have the digest `header` (XXH3, 64 bits)."""

    name: str
    size: Count
    data_start: Count
    header: Count


class Part(_Model):
    """Written by one rank: the file with the block checksums of its pieces, piece after piece.
    `digest` is the XXH3 (64 bits) of that file."""

    sums: str
    digest: Count
    pieces: Sequence[Piece] = ()
    """In version 1."""


class Group(_Model):
    """An optimizer group; see `pipeline.contracts.engine.ParameterGroup`."""

    settings: Mapping[str, Any]
    parameters: Sequence[str]


class Scale(_Model):
    """See `pipeline.contracts.engine.LossScale`."""

    scale: float
    good_steps: int


class State(_Model):
    """See `pipeline.contracts.engine.EngineState`; shapes are those of the `weight/` tensors."""

    aliases: Mapping[str, str]
    frozen: Sequence[str]
    groups: Sequence[Group]
    updates: Mapping[str, int]
    moments: Sequence[str]
    loss_scale: Scale | None
    averages: Sequence[str] = Field(default_factory=list)


class Manifest(_Model):
    """A whole checkpoint."""

    version: Literal[1, 2] = 2
    step: Annotated[int, Ge(0), Le(10**18)]
    written: str
    """Date and time, ISO 8601."""
    world_size: Annotated[int, Ge(1)]
    writer: Mapping[str, Any]
    """What wrote it: the engine's facts and the versions of its packages; for people."""
    progress: Mapping[str, Any]
    state: State
    block: Literal[16384] = safetensors_format.BLOCK
    tensors: Sequence[TensorEntry]
    runs: Sequence[Sequence[Run]] = ()
    """For each tensor, which rank has which part of it; not in version 1."""
    files: Sequence[DataFile]
    parts: Sequence[Part]
    """By rank. Where tensors do not lie whole in files, file number N is that of part number N."""

    def dump(self) -> bytes:
        """The file's bytes."""
        body = self.model_dump_json().encode()
        return _HEAD + body + _MIDDLE + hashlib.sha256(body).hexdigest().encode() + _TAIL

    @classmethod
    def load(cls, data: bytes, where: str) -> Manifest:
        """Verify and parse the file's bytes; raises Damaged, naming `where`, for anything that
        `dump` did not write."""
        end = len(data) - len(_TAIL) - _DIGEST - len(_MIDDLE)
        body = data[len(_HEAD) : max(end, 0)]
        wanted = _HEAD + body + _MIDDLE + hashlib.sha256(body).hexdigest().encode() + _TAIL
        if data != wanted:
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

    def _require_sense(self, where: str) -> None:
        """Names stay inside the folder, pieces inside their files; every tensor is whole."""
        names = [*(file.name for file in self.files), *(part.sums for part in self.parts)]
        for name in names:
            if not _NAME.fullmatch(name):
                raise Damaged(f"{where}: names a file outside of its folder: {name!r}")
        for twice in (*_repeated(names), *_repeated(tensor.key for tensor in self.tensors)):
            raise Damaged(f"{where}: has two entries for {twice}")
        for file in self.files:
            if file.data_start > file.size:
                raise Damaged(f"{where}: {file.name}: its header is longer than the file")
        for tensor in self.tensors:
            if tensor.dtype not in ITEM_BYTES:
                raise CheckpointError(f"{where}: {tensor.key} has the unknown dtype {tensor.dtype}")
        try:
            if self.version == 1:
                self._require_listed(where)
            else:
                self._require_ruled(where)
        except CoverageError as misfit:
            raise Damaged(f"{where}: {self.tensors[misfit.tensor].key}: {misfit}") from None

    def _require_ruled(self, where: str) -> None:
        if len(self.runs) != len(self.tensors) or any(part.pieces for part in self.parts):
            raise Damaged(f"{where}: does not say who has which tensor")
        for tensor in self.tensors:
            if tensor.numel >= LARGEST:
                raise Damaged(f"{where}: {tensor.key}: {tensor.numel} elements")
            if tensor.file is None and len(self.files) != len(self.parts):
                raise Damaged(f"{where}: {len(self.files)} files of {len(self.parts)} ranks")
            if tensor.file is not None and tensor.file >= len(self.files):
                raise Damaged(f"{where}: {tensor.key}: lies in an unknown file")
        numels = [tensor.numel for tensor in self.tensors]
        Division(self.runs).require_sense(numels, len(self.parts))

    def _require_listed(self, where: str) -> None:
        ranges: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for part in self.parts:
            for piece in part.pieces:
                self._require_inside(piece, where)
                ranges[piece.tensor].append((piece.start, piece.stop))
        for number, tensor in enumerate(self.tensors):
            try:
                require_cover(ranges[number], tensor.numel)
            except CoverageError as misfit:
                misfit.tensor = number
                raise

    def _require_inside(self, piece: Piece, where: str) -> None:
        if piece.tensor >= len(self.tensors) or piece.file >= len(self.files):
            raise Damaged(f"{where}: a piece of an unknown tensor or file")
        tensor, file = self.tensors[piece.tensor], self.files[piece.file]
        end = piece.offset + (piece.stop - piece.start) * tensor.itemsize
        if piece.start >= piece.stop or piece.offset < file.data_start or end > file.size:
            raise Damaged(f"{where}: {tensor.key}: a piece lies outside of {file.name}")


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]

"""The chunks that a `.distcp` file is made of, mapped instead of read.

Each chunk is a whole archive of `torch.save`, somewhere in the file. Its tensor's memory lies in it
uncompressed, so it is enough to find out where.
"""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import CheckpointError
from stages.formats.guarded import explained

_LOCAL_HEADER = 30
"""Bytes of a zip member's own header before its name (APPNOTE.TXT 4.3.7)."""


class Spot(NamedTuple):
    """Where a chunk is."""

    file: Path
    offset: int
    length: int


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, spot: Spot) -> None:
        self._file = spot.file.open("rb")
        self._begin, self._length = spot.offset, spot.length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(self._length - self._at, 0)]
        self._file.seek(self._begin + self._at)
        count = self._file.readinto(view)
        self._at += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def load_value(spot: Spot, name: str) -> Any:
    """A small value that is no tensor of its own. Raises CheckpointError."""
    try:
        with _Window(spot) as window:
            return torch.load(io.BytesIO(window.read()), map_location="cpu", weights_only=True)
    except Exception as error:
        raise explained(error, f"{spot.file} ({name})") from error


def map_bytes(spot: Spot, name: str, *, verify: bool) -> Tensor:
    """A chunk's tensor as bytes: its shape, and one more dimension for the bytes of an element.

    `verify` compares the checksum that `torch.save` stored. Raises CheckpointError.
    """
    try:
        with _Window(spot) as window:
            described = torch.load(cast(IO[bytes], window), map_location="meta", weights_only=True)
            with zipfile.ZipFile(window) as archive:
                wrong = archive.testzip() if verify else None
                members = [info for info in archive.infolist() if "/data/" in info.filename]
                offset = _data_offset(window, members[0])
    except Exception as error:
        raise explained(error, f"{spot.file} ({name})") from error
    wanted = described.numel() * described.element_size()
    if wrong is not None or len(members) != 1 or wanted > members[0].file_size:
        raise CheckpointError(f"{spot.file} ({name}): damaged")
    mapped = np.memmap(
        spot.file, np.uint8, mode="c", offset=spot.offset + offset, shape=(members[0].file_size,)
    )
    size = described.element_size()
    return torch.from_numpy(mapped).as_strided(
        (*described.shape, size),
        (*(stride * size for stride in described.stride()), 1),
        described.storage_offset() * size,
    )


def _data_offset(window: _Window, member: zipfile.ZipInfo) -> int:
    """Where a member's bytes begin; its own header may be longer than the directory says."""
    if member.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError("compressed")
    window.seek(member.header_offset)
    name, extra = struct.unpack("<26x2H", window.read(_LOCAL_HEADER))
    return member.header_offset + _LOCAL_HEADER + int(name) + int(extra)

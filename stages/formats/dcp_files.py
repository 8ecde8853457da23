"""The chunks that a `.distcp` file is made of, mapped instead of read.

Each chunk is a whole archive of `torch.save`, somewhere in the file. Its tensor's memory lies in it
uncompressed, so it is enough to find out where.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch
import torch.serialization
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from pipeline.errors import CheckpointError
from stages.formats.boxes import Box
from stages.formats.files import explained
from stages.formats.mapped import Shape

_FILE = re.compile(r"(?!\.)[\w.-]+", re.ASCII)
_WRITER = re.compile(r"__(\d+)_\d+\.distcp")


class StoredTensor(NamedTuple):
    """A tensor as boxes, each with the place of its memory."""

    shape: Shape
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    spots: tuple[Spot, ...]


class StoredValue(NamedTuple):
    """Anything else."""

    spot: Spot


Item = StoredTensor | StoredValue
Path_ = tuple[str, ...]
"""The keys of nested dicts and lists that lead to an item."""


def read_items(folder: Path) -> dict[Path_, Item]:
    """All that one folder holds. Raises CheckpointError."""
    metadata = read_metadata(folder)
    paths = metadata.planner_data
    if not isinstance(paths, dict):
        raise CheckpointError(f"{folder}: does not say what its names mean (no planner data)")
    spots = dict(_spots(folder, metadata))
    found: dict[Path_, Item] = {}
    for name, stored in metadata.state_dict_metadata.items():
        path = tuple(map(str, paths.get(name, (name,))))
        found[path] = _item(folder, name, stored, spots)
    return found


def writers(items: dict[Path_, Item]) -> int:
    """Number of ranks that wrote."""
    ranks = {0}
    for item in items.values():
        for spot in item.spots if isinstance(item, StoredTensor) else (item.spot,):
            match = _WRITER.fullmatch(spot.file.name)
            ranks.add(int(match.group(1)) if match else 0)
    return max(ranks) + 1


def value_of(item: Item, name: str) -> Any:
    """A value, or a tensor of one element as a number."""
    if isinstance(item, StoredValue):
        return load_value(item.spot, name)
    if len(item.spots) != 1:
        raise CheckpointError(f"{name}: a number that is stored in {len(item.spots)} chunks")
    return load_value(item.spots[0], name).item()


def _spots(folder: Path, metadata: Metadata) -> Iterator[tuple[tuple[str, Shape | None], Spot]]:
    for index, info in metadata.storage_data.items():
        if not _FILE.fullmatch(info.relative_path):
            raise CheckpointError(f"{folder}: names a file outside of it: {info.relative_path!r}")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{folder}: {index.fqn} is compressed, which is not converted")
        offset = None if index.offset is None else tuple(index.offset)
        yield (index.fqn, offset), Spot(folder / info.relative_path, info.offset, info.length)


def _item(
    folder: Path, name: str, stored: Any, spots: dict[tuple[str, Shape | None], Spot]
) -> Item:
    try:
        if not isinstance(stored, TensorStorageMetadata):
            return StoredValue(spots[name, None])
        boxes = [
            Box(tuple(chunk.offsets), tuple(chunk.sizes))
            for chunk in stored.chunks
            if 0 not in chunk.sizes
        ]
        return StoredTensor(
            shape=tuple(stored.size),
            dtype=stored.properties.dtype,
            boxes=tuple(boxes),
            spots=tuple(spots[name, box.offsets] for box in boxes),
        )
    except KeyError:
        raise CheckpointError(f"{folder}: does not say where a part of {name} is") from None


MOST_BYTES = 1 << 30

_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
}  # fmt: skip
_MODULES: dict[str, Any] = {
    "torch.distributed.checkpoint.metadata": metadata,
    "torch.distributed.checkpoint.filesystem": filesystem,
}
_DTYPES = {
    str(t).removeprefix("torch.") for t in vars(torch).values() if isinstance(t, torch.dtype)
}


class _Text:
    """Stands in for the path of the folder where it was saved."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts


class _Refused(Exception):
    """Something that is not admitted."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return getattr(_MODULES[module], name)
        if module == "torch" and (name == "Size" or name in _DTYPES):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return torch.serialization._get_layout
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module.startswith("pathlib") and name in ("PosixPath", "WindowsPath"):
            return _Text
        raise _Refused(f"{module}.{name}")


def read_metadata(folder: Path) -> Metadata:
    """What the folder holds. Raises CheckpointError."""
    file = folder / ".metadata"
    try:
        if file.stat().st_size > MOST_BYTES:
            raise CheckpointError(f"{file}: larger than any list of tensors")
        with file.open("rb") as stream:
            found = _Unpickler(stream).load()
    except CheckpointError:
        raise
    except _Refused as refused:
        raise CheckpointError(
            f"{file}: refused: it holds {refused}, and reading that could run code",
            hint="only descriptions of tensors are read",
        ) from None
    except Exception as error:
        raise CheckpointError(f"{file}: cannot be read: {error or type(error).__name__}") from error
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{file}: is no metadata of torch.distributed.checkpoint")
    return found


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

"""Files of torch.distributed.checkpoint: `.metadata` read without running it, chunks mapped or
written.

Each chunk is a whole archive of `torch.save`, somewhere in a `.distcp` file. Its tensor's memory
lies in it uncompressed, so it can be mapped.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch
import torch.serialization
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec._internals import (
    check_tensor,
    validate_non_overlapping_shards_metadata,
)
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from pipeline import CheckpointError
from pipeline.checkpoint import StateSource
from pipeline.utils import open_regular, require_trust
from stages.formats.stored import (
    Box,
    Shape,
    Stored,
    append,
    assembled,
    explained,
    require_checksums,
)

_FILE = re.compile(r"(?!\.)[\w.-]+", re.ASCII)
_DATA = "__0_0.distcp"
"""torch's name of the first file of rank 0."""


class Chunk(NamedTuple):
    """Bytes [offset, offset + length) of a file: an archive of `torch.save`."""

    file: Path
    offset: int
    length: int


Keys = tuple[str, ...]
"""Keys of nested dicts and lists that lead to an item."""
MAPPED = 1024
"""Chunks that stay mapped, as each is read in many parts."""


def read_items(folder: Path) -> dict[Keys, Stored | Chunk]:
    """Entries of the state dict in a folder: tensors, and the chunks of other values. Raises
    CheckpointError."""
    found = read_metadata(folder)
    chunks: dict[tuple[str, Shape | None], Chunk] = {}
    for index, info in found.storage_data.items():
        if not _FILE.fullmatch(info.relative_path):
            raise CheckpointError(f"{folder}: names a file outside of it: {info.relative_path!r}")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{folder}: {index.fqn} is compressed, which is not converted")
        offsets = None if index.offset is None else tuple(index.offset)
        file = folder / info.relative_path
        chunks[index.fqn, offsets] = Chunk(file, info.offset, info.length)
    mapped = functools.lru_cache(MAPPED)(map_chunk)
    return {
        tuple(map(str, found.planner_data[name])): _stored(name, described, chunks, mapped)
        if isinstance(described, metadata.TensorStorageMetadata)
        else chunks[name, None]
        for name, described in found.state_dict_metadata.items()
    }


def _stored(
    name: str,
    described: metadata.TensorStorageMetadata,
    chunks: Mapping[tuple[str, Shape | None], Chunk],
    load: Callable[..., Tensor],
) -> Stored:
    cut = [Box(tuple(c.offsets), tuple(c.sizes)) for c in described.chunks if 0 not in c.sizes]
    require_cover(cut, described.size)
    own = [chunks[name, box.offsets] for box in cut]
    # A scalar is read as a vector of one element.
    boxes = [Box(box.offsets or (0,), box.sizes or (1,)) for box in cut]
    shape, dtype = tuple(described.size), described.properties.dtype
    return Stored(
        shape=shape,
        dtype=dtype,
        grid=shape or (1,),
        boxes=boxes,
        load=lambda number: load(own[number], boxes[number], dtype.itemsize, name),
    )


def require_cover(boxes: Sequence[Box], shape: Sequence[int]) -> None:
    """Raise ValueError unless the boxes divide a tensor of this shape."""
    shards = [ShardMetadata(list(box.offsets), list(box.sizes)) for box in boxes]
    if shards:
        check_tensor(shards, shape)
        validate_non_overlapping_shards_metadata(shards)
    elif math.prod(shape):
        raise ValueError("a tensor that holds no chunk")


_DESCRIPTIONS = (
    Metadata, metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata, metadata.MetadataIndex,
    metadata.StorageMeta, metadata.TensorProperties, metadata.TensorStorageMetadata,
    metadata._MEM_FORMAT_ENCODING, _StorageInfo, torch.Size,
)  # fmt: skip
_ADMITTED: dict[str, Any] = {
    **{f"{kind.__module__}.{kind.__qualname__}": kind for kind in _DESCRIPTIONS},
    **{str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
    **{f"{module}.{kind}Path": PurePath for module in ("pathlib", "pathlib._local")
       for kind in ("Posix", "Windows")},
    "torch.serialization._get_layout": torch.serialization._get_layout,
    "collections.OrderedDict": dict,
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in _ADMITTED:
            raise pickle.UnpicklingError(f"GLOBAL {full}")
        return _ADMITTED[full]


def read_metadata(folder: Path) -> Metadata:
    """Content of `.metadata`, from which only descriptions of tensors are unpickled."""
    file = folder / ".metadata"
    require_trust(file)
    try:
        with open_regular(file) as stream:
            found = _Unpickler(stream).load()
        if not isinstance(found, Metadata):
            raise TypeError("not the metadata of torch.distributed.checkpoint")
    except Exception as error:
        raise explained(error, str(file)) from error
    return found


class _Window(io.RawIOBase):
    """Bytes in memory as a file, without a copy."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._at = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._memory)}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        part = self._memory[self._at : self._at + len(buffer)]
        memoryview(buffer)[: len(part)] = part
        self._at += len(part)
        return len(part)


def _mapped(chunk: Chunk) -> np.memmap[Any, Any]:
    return np.memmap(chunk.file, np.uint8, "c", chunk.offset, (chunk.length,))


def load_value(item: Stored | Chunk, name: str) -> Any:
    """A value, or a tensor of one element as a number. Raises CheckpointError."""
    if isinstance(item, Stored):
        ((_, data),) = item.read(0, math.prod(item.shape))
        return torch.frombuffer(data, dtype=item.dtype).item()
    try:
        return torch.load(io.BytesIO(_mapped(item).data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise explained(error, f"{item.file} ({name})") from error


def map_chunk(chunk: Chunk, box: Box, itemsize: int, name: str) -> Tensor:
    """A chunk's tensor as bytes, of shape (*sizes of the box, itemsize), mapped after its checksum
    was verified. Raises CheckpointError."""
    try:
        memory = _mapped(chunk)
        window = cast(IO[bytes], _Window(memory.data))
        found = torch.load(window, map_location="meta", weights_only=True)
        with zipfile.ZipFile(window) as archive:
            require_checksums(archive)
            (member,) = (info for info in archive.infolist() if "/data/" in info.filename)
            with archive.open(member):
                offset = window.tell()  # opening reads the member's own header
        shape = (*box.sizes, itemsize)
        if found.nbytes != math.prod(shape) or found.nbytes > member.file_size:
            raise ValueError(f"a chunk has {found.nbytes} bytes instead of {math.prod(shape)}")
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError("a chunk is compressed")
        strides = (*(stride * itemsize for stride in found.stride()), 1)
        data = torch.from_numpy(memory[offset : offset + member.file_size])
        place = found.storage_offset() * itemsize
        return data.as_strided((*found.shape, itemsize), strides, place).reshape(shape)
    except Exception as error:
        raise explained(error, f"{chunk.file} ({name})") from error


def write_state_dict(
    source: StateSource,
    keys: Mapping[str, Mapping[str, str]],
    values: Mapping[str, Mapping[str, Any]],
    folder: Path,
) -> None:
    """Write a state dict of sections, as rank 0 of one process does, one tensor in memory at a
    time: tensors of `source` by their `keys`, and plain `values`. Raises CheckpointError,
    OSError."""
    written = Metadata({}, planner_data={}, storage_data={})
    with (folder / _DATA).open("wb") as stream:
        for section, named in keys.items():
            for name, key in named.items():
                _write((section, name), assembled(source, key), stream, written)
            for name, value in values.get(section, {}).items():
                _write((section, name), value, stream, written)
    with (folder / ".metadata").open("wb") as stream:
        pickle.dump(written, stream)


def _write(keys: Keys, value: Any, stream: IO[bytes], written: Metadata) -> None:
    name, begin = ".".join(keys), stream.tell()
    append(value, stream)
    index, described = metadata.MetadataIndex(name), cast(Any, metadata.BytesStorageMetadata())
    if isinstance(value, Tensor):
        zeros = torch.Size([0] * value.dim())
        index = metadata.MetadataIndex(name, zeros)
        chunk = metadata.ChunkStorageMetadata(zeros, value.size())
        properties = metadata.TensorProperties.create_from_tensor(value)
        described = metadata.TensorStorageMetadata(properties, value.size(), [chunk])
    if name in written.state_dict_metadata:
        raise CheckpointError(f"{name}: there are two entries of this name")
    written.planner_data[name] = keys
    written.state_dict_metadata[name] = described
    written.storage_data[index] = _StorageInfo(_DATA, begin, stream.tell() - begin)

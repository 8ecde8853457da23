"""States in the terms and the files of torch.distributed.checkpoint: state dicts of a model and an
optimizer, `.metadata` that is read without running it, chunks that are mapped or written.

Each chunk is a whole archive of `torch.save`, somewhere in a `.distcp` file. Its tensor's memory
lies in it uncompressed, so it can be mapped.
"""

from __future__ import annotations

import functools
import io
import itertools
import math
import pickle
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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

from pipeline import WEIGHT, CheckpointError, EngineState, ParameterGroup, Progress
from pipeline.checkpoint import Reading, StateSource, appearing
from pipeline.utils import open_regular, require_trust
from stages.formats import stored
from stages.formats.stored import MOMENTS, Box, Shape, Stored, explained

_FILE = re.compile(r"(?!\.)[\w.-]+", re.ASCII)
_DATA = "__0_0.distcp"
"""torch's name of the first file of rank 0."""
MODEL, OPTIMIZER, STEP = "model", "optimizer", "step"


class Chunk(NamedTuple):
    """Bytes [offset, offset + length) of a file: an archive of `torch.save`."""

    file: Path
    offset: int
    length: int


Keys = tuple[str, ...]
"""Keys of nested dicts and lists that lead to an item."""
MAPPED = 1024
"""Chunks that stay mapped, as each is read in many parts."""


class Optimizer(NamedTuple):
    """Entries of an optimizer's state dict by parameter, the settings by parameter or by group."""

    moments: dict[str, dict[str, Stored | Chunk]]
    counts: dict[str, Stored | Chunk]
    settings: dict[str, dict[str, Stored | Chunk]]


def open_dcp(folder: Path, parts: Sequence[Path], reading: Reading) -> StateSource:
    """The state in the folders `parts` of `folder`. Raises CheckpointError."""
    items: dict[Keys, Stored | Chunk] = {}
    for part in parts:
        items |= read_items(part)
    # Tensors under `model`, or next to the optimizer if there are none.
    tensors = {keys: item for keys, item in items.items() if isinstance(item, Stored)}
    named = {keys[1:]: one for keys, one in tensors.items() if keys[0] == MODEL and len(keys) > 1}
    named = named or {keys: one for keys, one in tensors.items() if len(keys) == 1}
    found = {f"{WEIGHT}/{'.'.join(keys)}": one for keys, one in named.items()}
    weights, optimizer = [".".join(keys) for keys in named], _optimizer(items)
    if not weights:
        raise CheckpointError(f"{folder}: holds no weights")
    moments = {} if reading.weights_only else _moments(folder, optimizer, weights)
    aliases = dict(_aliases(found, [name for name in optimizer.moments if name in weights]))
    for alias in aliases:
        del found[f"{WEIGHT}/{alias}"]
    updates = {
        name: int(load_value(optimizer.counts[name], f"{name}.{STEP}"))
        for name in optimizer.moments
        if name in optimizer.counts or not reading.weights_only
    }
    step = max(updates.values(), default=0)
    # Ranks are in the names of their files.
    files = (file.name for part in parts for file in part.iterdir())
    writers = (re.fullmatch(r"__(\d+)_\d+\.distcp", name) for name in files)
    return stored.MappedSource(
        where=str(folder),
        step=step,
        world_size=max((int(match[1]) for match in writers if match), default=0) + 1,
        writer={"format": "dcp"},
        progress=vars(Progress(step=step, samples=reading.samples)),
        state=EngineState(
            aliases=aliases,
            frozen=[n for n in weights if n not in optimizer.moments and n not in aliases],
            groups=[] if reading.weights_only else list(_groups(optimizer)),
            updates=updates,
            loss_scale=None,
        ),
        stored=found | moments,
    )


def _optimizer(items: Mapping[Keys, Stored | Chunk]) -> Optimizer:
    """Items whose keys, however nested, are `optimizer.state.NAME.KIND`, and
    `optimizer.param_groups.NAME.SETTING` or `optimizer.param_groups.NUMBER.SETTING`."""
    found = Optimizer(defaultdict(dict), {}, defaultdict(dict))
    for keys, item in items.items():
        match = re.fullmatch(r"optimizer\.(state|param_groups)\.(.*)\.(\w+)", ".".join(keys), re.S)
        if keys[0] != OPTIMIZER or match is None:
            continue
        section, name, kind = match.groups()
        if section == "param_groups":
            found.settings[name][kind] = item
        elif kind == STEP:
            found.counts[name] = item
        else:
            found.moments[name][kind] = item
    return found


def _moments(folder: Path, optimizer: Optimizer, weights: Collection[str]) -> dict[str, Stored]:
    """The moments by key. Raises CheckpointError unless they are Adam's, of weights."""
    if not optimizer.moments:
        raise CheckpointError(
            f"{folder}: holds no optimizer state", hint="--weights-only takes only the weights"
        )
    found = {}
    for name, kinds in optimizer.moments.items():
        stored.require_moments(kinds, str(folder), name)
        if name not in weights:
            raise CheckpointError(f"{folder}: holds optimizer state of {name}, but no weight")
        for kind, item in kinds.items():
            if isinstance(item, Chunk):
                raise CheckpointError(f"{item.file}: the state of {name} is not a tensor")
            found[f"{kind}/{name}"] = item
    return found


def _aliases(found: Mapping[str, Stored], trained: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Untrained matrices that equal a trained one: other names of a tied weight."""

    def equal(one: Stored, other: Stored) -> bool:
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        numel = math.prod(one.shape)
        both = zip(one.read(0, numel), other.read(0, numel), strict=True)
        return all(a == b for (_, a), (_, b) in both)

    for key, tensor in found.items():
        name = key.removeprefix(f"{WEIGHT}/")
        if name not in trained and len(tensor.shape) > 1:
            same = (one for one in trained if equal(tensor, found[f"{WEIGHT}/{one}"]))
            yield from ((name, other) for other in itertools.islice(same, 1))


def _groups(optimizer: Optimizer) -> Iterator[ParameterGroup]:
    """The numbered groups, or else parameters of equal hyperparameters as a group."""
    numbers = sorted(filter(str.isdecimal, optimizer.settings), key=int)
    for number in numbers:
        values = _values(optimizer, number, "params")
        yield stored.group(values, values["params"])
    found: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for name in () if numbers else optimizer.moments:
        own = _values(optimizer, name)
        found.setdefault(str(stored.settings(own)), (own, []))[1].append(name)
    yield from (stored.group(own, names) for own, names in found.values())


def _values(optimizer: Optimizer, name: str, *more: str) -> dict[str, Any]:
    wanted = (*stored.SETTINGS, "initial_lr", *more)
    items = optimizer.settings.get(name, {})
    return {key: load_value(items[key], f"{name}.{key}") for key in wanted if key in items}


def write_dcp(source: StateSource, folder: Path) -> Sequence[str]:
    """Write `folder`; returns notes for its users. Raises CheckpointError unless it is of AdamW."""
    state = source.state
    if state.kinds():
        stored.require_adam(source, "only weights and Adam's moments can be written")
    own = {name: entry.key for name, entry in stored.weights_of(source).items()}
    tied = {alias: own[name] for alias, name in state.aliases.items()}
    moments = {
        f"state.{name}.{kind}": f"{kind}/{name}" for name in state.updates for kind in MOMENTS
    }
    keys = {MODEL: own | tied, **({OPTIMIZER: moments} if state.kinds() else {})}
    values = {OPTIMIZER: dict(_optimizer_values(source))} if state.kinds() else {}
    with appearing(folder) as partial:
        write_state_dict(source, keys, values, partial)
    notes = [
        "load it with torch.distributed.checkpoint.load into what get_model_state_dict and "
        "get_optimizer_state_dict(options=StateDictOptions(flatten_optimizer_state_dict=True)) "
        "return, as {'model': ..., 'optimizer': ...}"
    ]
    if state.averages:
        kinds = ", ".join(state.averages)
        notes.append(f"left out, as the format lacks it: {kinds} of the weights")
    return notes


def _optimizer_values(source: StateSource) -> Iterator[tuple[str, Any]]:
    """Entries other than the moments, named as `get_optimizer_state_dict` flattens them. Raises
    CheckpointError for other settings than AdamW's."""
    for name, count in source.state.updates.items():
        yield f"state.{name}.{STEP}", torch.tensor(float(count))
    for group in source.state.groups:
        own = group.settings
        if set(own) != set(stored.SETTINGS):
            raise CheckpointError(
                f"{source.where}: the optimizer has the settings {', '.join(sorted(own))}; only "
                f"AdamW's {', '.join(stored.SETTINGS)} can be converted"
            )
        # Loading needs every setting of torch's AdamW.
        known = {**own, "betas": tuple(own["betas"])}
        (whole,) = torch.optim.AdamW([torch.zeros(1)], **known).param_groups
        for key, value in {**whole, "initial_lr": own["lr"]}.items():
            if key != "params":
                yield from ((f"param_groups.{name}.{key}", value) for name in group.parameters)


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


def load_value(item: Stored | Chunk, name: str) -> Any:
    """A value, or a tensor of one element as a number. Raises CheckpointError."""
    if isinstance(item, Stored):
        ((_, data),) = item.read(0, math.prod(item.shape))
        return torch.frombuffer(data, dtype=item.dtype).item()
    try:
        content = np.memmap(item.file, np.uint8, "c", item.offset, (item.length,)).data
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        raise explained(error, f"{item.file} ({name})") from error


def map_chunk(chunk: Chunk, box: Box, itemsize: int, name: str) -> Tensor:
    """A chunk's tensor as bytes, of shape (*sizes of the box, itemsize), mapped after its checksum
    was verified. Raises CheckpointError."""
    try:
        memory = np.memmap(chunk.file, np.uint8, "c", chunk.offset, (chunk.length,))
        window = cast(IO[bytes], _Window(memory.data))
        found = torch.load(window, map_location="meta", weights_only=True)
        with zipfile.ZipFile(window) as archive:
            stored.require_checksums(archive)
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
            tensors = ((name, stored.assembled(source, key)) for name, key in named.items())
            for entry, value in itertools.chain(tensors, values.get(section, {}).items()):
                name, begin = f"{section}.{entry}", stream.tell()
                stored.append(value, stream)
                index = metadata.MetadataIndex(name)
                described: Any = metadata.BytesStorageMetadata()
                if isinstance(value, Tensor):
                    zeros = torch.Size([0] * value.dim())
                    index = metadata.MetadataIndex(name, zeros)
                    chunk = metadata.ChunkStorageMetadata(zeros, value.size())
                    properties = metadata.TensorProperties.create_from_tensor(value)
                    described = metadata.TensorStorageMetadata(properties, value.size(), [chunk])
                if name in written.state_dict_metadata:
                    raise CheckpointError(f"{name}: there are two entries of this name")
                written.planner_data[name] = (section, entry)
                written.state_dict_metadata[name] = described
                written.storage_data[index] = _StorageInfo(_DATA, begin, stream.tell() - begin)
    with (folder / ".metadata").open("wb") as stream:
        pickle.dump(written, stream)

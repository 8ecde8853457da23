"""What torch.distributed.checkpoint stored under which name, and where."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from pipeline.errors import CheckpointError
from stages.formats.dcp_boxes import Box
from stages.formats.dcp_chunks import Spot, load_value
from stages.formats.dcp_metadata import read_metadata
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

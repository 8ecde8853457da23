"""A state whose tensors are ranges of tensors that are mapped from files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.errors import CheckpointError
from pipeline.state.blocks import CHUNK
from pipeline.state.dtypes import CODES, as_bytes
from pipeline.state.manifest import State, TensorEntry
from pipeline.state.source import StateSource

Shape = tuple[int, ...]


class Range(NamedTuple):
    """Elements [start, stop) of a flat tensor."""

    tensor: Tensor
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A logical tensor as consecutive ranges, which make it up exactly."""

    shape: Shape
    ranges: Sequence[Range]


def flattened(tensor: Tensor) -> Tensor:
    """All elements in order. Raises ValueError for a tensor with more than its memory has, which
    a few bytes can describe."""
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ValueError("a tensor is larger than what is stored of it")
    whole = tensor.detach().contiguous()
    return whole.as_strided((whole.numel(),), (1,))  # one element can have any stride


def whole(tensor: Tensor) -> Stored:
    """A tensor that is stored in one piece."""
    flat = flattened(tensor)
    return Stored(shape=tuple(tensor.shape), ranges=[Range(flat, 0, flat.numel())])


class MappedSource(StateSource):
    """`stored` is by key. Raises CheckpointError for ranges that do not make up their tensor."""

    def __init__(
        self,
        *,
        where: str,
        step: int,
        world_size: int,
        writer: Mapping[str, Any],
        progress: Mapping[str, Any],
        state: State,
        stored: Mapping[str, Stored],
    ) -> None:
        self.where = where
        self.step = step
        self.world_size = world_size
        self.writer = writer
        self.progress = progress
        self.state = state
        self._stored = dict(stored)
        self.tensors = {key: self._entry(key, value) for key, value in self._stored.items()}

    def read(self, key: str, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        self.entry(key)
        begin = 0
        for tensor, first, last in self._stored[key].ranges:
            low, high = max(start, begin), min(stop, begin + last - first)
            if low < high:
                part = tensor[first + low - begin : first + high - begin]
                yield from _chunks(part, low)
            begin += last - first

    def close(self) -> None:
        self._stored.clear()

    def _entry(self, key: str, stored: Stored) -> TensorEntry:
        dtypes = {part.tensor.dtype for part in stored.ranges}
        if len(dtypes) != 1:
            raise CheckpointError(f"{self.where}: {key} is stored in {len(dtypes)} dtypes")
        entry = entry_of(key, dtypes.pop(), stored.shape, self.where)
        self._require_whole(entry, stored.ranges)
        return entry

    def _require_whole(self, entry: TensorEntry, ranges: Iterable[Range]) -> None:
        found = 0
        for tensor, start, stop in ranges:
            if not 0 <= start <= stop <= tensor.numel():
                raise CheckpointError(
                    f"{self.where}: {entry.key}: elements {start} to {stop} of a tensor with "
                    f"{tensor.numel()}: incomplete, or written by another version"
                )
            found += stop - start
        if found != entry.numel:
            raise CheckpointError(
                f"{self.where}: {entry.key} has {found} elements instead of {entry.numel}"
            )


def _chunks(flat: Tensor, first: int) -> Iterator[tuple[int, memoryview]]:
    """A flat tensor's bytes; `first` is the number of its first element."""
    step = CHUNK // flat.element_size()
    for start in range(0, flat.numel(), step):
        yield first + start, as_bytes(flat[start : start + step])


def entry_of(key: str, dtype: torch.dtype, shape: Shape, where: str) -> TensorEntry:
    """A tensor in canonical terms. Raises CheckpointError for a dtype that these lack."""
    if dtype not in CODES:
        raise CheckpointError(f"{where}: {key} is {dtype}, which cannot be converted")
    return TensorEntry(key=key, dtype=CODES[dtype], shape=tuple(shape))

"""A state whose tensors are ranges of tensors that are mapped from files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.checkpoint.formats import StateSource
from pipeline.checkpoint.layout import CODES, DTYPES, as_bytes
from pipeline.checkpoint.manifest import TensorEntry
from pipeline.checkpoint.safetensors_format import CHUNK
from pipeline.contracts.engine import EngineState
from pipeline.errors import CheckpointError

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
        state: EngineState,
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


_NAME = re.compile(r"(?!\.)[\w.-]{1,200}", re.ASCII)


def assembled(source: StateSource, key: str) -> Tensor:
    """The tensor `key` with its shape."""
    entry = source.entry(key)
    flat = torch.empty(entry.numel, dtype=DTYPES[entry.dtype])
    source.read_into(key, 0, as_bytes(flat))
    return flat.view(tuple(entry.shape))


def require_file_name(name: str, where: str) -> str:
    """A tensor's name that is to be the name of a folder. Raises CheckpointError for one that would
    lead elsewhere."""
    if not _NAME.fullmatch(name):
        raise CheckpointError(f"{where}: {name!r} cannot be the name of a folder")
    return name


MOMENTS = ("exp_avg", "exp_avg_sq")
SETTINGS = ("lr", "betas", "eps", "weight_decay")
"""Hyperparameters that say what the optimizer computes; the rest says how."""


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of a saved group. The learning rate is the base rate where the group keeps it; without a
    schedule of torch's, only the rate of the last step is there."""
    found = {key: plain(group[key]) for key in SETTINGS if key in group}
    if group.get("initial_lr") is not None:
        found["lr"] = plain(group["initial_lr"])
    return found


def plain(value: Any) -> Any:
    """A saved value as JSON has it."""
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def require_moments(kinds: Collection[str], where: str, name: str) -> None:
    """Raises CheckpointError unless a parameter has what Adam keeps for every element of it."""
    if not kinds:
        raise CheckpointError(
            f"{where}: holds no optimizer state of {name}",
            hint="it was saved before the first update, or by DeepSpeed with an offload ratio "
            "below 1; --weights-only takes the weights alone",
        )
    if set(kinds) != set(MOMENTS):
        raise CheckpointError(
            f"{where}: the optimizer kept {', '.join(sorted(kinds))} for {name}; only Adam's "
            f"{' and '.join(MOMENTS)} can be converted",
            hint="--weights-only takes the weights alone",
        )


def fresh_progress(step: int, samples: int, skipped: int = 0) -> dict[str, Any]:
    """Progress of a training that is not ours: whose model and data it was is unknown."""
    return {
        "step": step, "samples": samples, "tokens": 0, "skipped": skipped,
        "metrics": {}, "lineage": {},
    }  # fmt: skip

"""The live side of consolidate.deepspeed.

Each rank saved flat fp32 master weights. They are mapped, not read: only the slices that one full
tensor is made of are touched when it is asked for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.artifacts import Weights
from pipeline.errors import CheckpointError
from stages.checkpoint.deepspeed_state import TAG
from stages.wrap.zero.saved import SavedMasters, load_saved, rank_of, saved_masters, swapped_in

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Slices:
    """A full tensor as consecutive ranges of flat tensors; a tail beyond its size is padding."""

    shape: Shape
    parts: Sequence[tuple[Tensor, int, int]]

    def read(self) -> Tensor:
        flat = torch.cat([tensor.detach()[start:stop] for tensor, start, stop in self.parts])
        return flat[: math.prod(self.shape)].float().view(self.shape)


class DeepSpeedWeights(Weights):
    """Trained and frozen parameters in fp32, buffers as they are, tied names each listed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, Slices | Tensor] = dict(_tensors(folder / TAG))

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> Shape:
        return tuple(self._found(name).shape)

    def read(self, name: str) -> Tensor:
        found = self._found(name)
        return found.read() if isinstance(found, Slices) else found.detach().clone()

    def close(self) -> None:
        self._tensors.clear()

    def _found(self, name: str) -> Slices | Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"{self._folder}: holds no tensor {name}")
        return self._tensors[name]


def _tensors(folder: Path) -> Iterator[tuple[str, Slices | Tensor]]:
    models = _load_all(folder, "*_model_states.pt")
    masters = [
        saved_masters(state) for state in _load_all(folder, "*zero_pp_rank_*_optim_states.pt")
    ]
    groups = models[0]["param_shapes"]
    whole = len(models) == 1 and (folder / "mp_rank_00_model_states.pt").exists()
    found: dict[str, Slices | Tensor] = {
        name: models[0]["module"][name] for name in models[0]["buffer_names"]
    }
    if whole:
        found |= _whole_frozen(models[0], groups)
        found |= _from_partitions(groups, masters)
    else:
        found |= _sharded_frozen(models)
        flats = [swapped_in(folder, rank, saved) for rank, saved in enumerate(masters)]
        found |= _from_shards(groups, flats)
    for alias, name in models[0]["shared_params"].items():
        found[alias] = found[name]
    yield from found.items()


def _load_all(folder: Path, pattern: str) -> list[Mapping[str, Any]]:
    """Every rank's file, in rank order."""
    files = sorted(folder.glob(pattern), key=rank_of)
    if not files:
        raise CheckpointError(f"{folder}: no {pattern}")
    return [load_saved(file) for file in files]


def _whole_frozen(
    state: Mapping[str, Any], groups: Sequence[Mapping[str, Shape]]
) -> dict[str, Slices]:
    """Stages 1 and 2: parameters without a master, which every rank holds whole."""
    known = {name for group in groups for name in group}
    known |= {*state["buffer_names"], *state["shared_params"]}
    return {name: _one(value) for name, value in state["module"].items() if name not in known}


def _one(tensor: Tensor) -> Slices:
    return Slices(shape=tuple(tensor.shape), parts=[(tensor.flatten(), 0, tensor.numel())])


def _from_partitions(
    groups: Sequence[Mapping[str, Shape]], masters: Sequence[SavedMasters]
) -> dict[str, Slices]:
    """Stages 1 and 2: a group is one vector of all its parameters, cut into a part per rank."""
    found = {}
    for index, group in enumerate(groups):
        flats = [saved.flats[index] for saved in masters]
        padding = masters[0].padding(index, len(group))
        start = 0
        for (name, shape), pad in zip(group.items(), padding, strict=True):
            stop = start + math.prod(shape)
            found[name] = Slices(shape=tuple(shape), parts=list(_cut(flats, start, stop)))
            start = stop + pad
    return found


def _cut(flats: Sequence[Tensor], start: int, stop: int) -> Iterator[tuple[Tensor, int, int]]:
    """The range [start, stop) of the concatenation of `flats`."""
    ends = itertools.accumulate(flat.numel() for flat in flats)
    for flat, end in zip(flats, ends, strict=True):
        begin = end - flat.numel()
        if start < end and begin < stop:
            yield flat, max(start - begin, 0), min(stop - begin, flat.numel())


def _from_shards(
    groups: Sequence[Mapping[str, Shape]], flats: Sequence[Sequence[Tensor]]
) -> dict[str, Slices]:
    """Stage 3: each parameter is cut into a part per rank, the last padded; a rank's flat tensor
    of a sub-group has its parts of all parameters in order."""
    found = {}
    for index, group in enumerate(groups):
        start = 0
        for name, shape in group.items():
            stop = start + -(-math.prod(shape) // len(flats))
            parts = [(rank[index], start, stop) for rank in flats]
            found[name] = Slices(shape=tuple(shape), parts=parts)
            start = stop
    return found


def _sharded_frozen(models: Sequence[Mapping[str, Any]]) -> dict[str, Slices]:
    """Stage 3: each rank saved its part of every parameter without a master."""
    found = {}
    for name, shape in (models[0]["frozen_param_shapes"] or {}).items():
        fragments = [state["frozen_param_fragments"][name].flatten() for state in models]
        parts = [(fragment, 0, fragment.numel()) for fragment in fragments]
        found[name] = Slices(shape=tuple(shape), parts=parts)
    return found

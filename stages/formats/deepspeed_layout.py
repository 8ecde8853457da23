"""Which part of which flat tensor each parameter has, under ZeRO.

A flat tensor holds master weights or a moment of them; all of a group's have the same layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from pipeline.errors import CheckpointError
from stages.formats.deepspeed_files import Fragment
from stages.formats.mapped import Range, Shape, Stored


class Place(NamedTuple):
    """Elements [start, stop) of the flat tensor of rank `rank`."""

    rank: int
    start: int
    stop: int


class Placed(NamedTuple):
    """A parameter, and the places that make it up, in order."""

    shape: Shape
    places: Sequence[Place]

    def stored(self, flats: Sequence[Tensor]) -> Stored:
        """Its part of every rank's flat tensor."""
        ranges = [Range(flats[place.rank], place.start, place.stop) for place in self.places]
        return Stored(shape=self.shape, ranges=ranges)


def replicated(
    shapes: Mapping[str, Shape], paddings: Sequence[int], lengths: Sequence[int]
) -> dict[str, Placed]:
    """Stages 1 and 2: a group is one vector of its parameters, `paddings` elements behind each,
    cut into a part per rank, of `lengths` elements."""
    found = {}
    start = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        stop = start + math.prod(shape)
        found[name] = Placed(tuple(shape), list(_cut(lengths, start, stop)))
        start = stop + padding
    return found


def _cut(lengths: Sequence[int], start: int, stop: int) -> Iterator[Place]:
    begin = 0
    for rank, length in enumerate(lengths):
        low, high = max(start, begin), min(stop, begin + length)
        if low < high:
            yield Place(rank, low - begin, high - begin)
        begin += length


def sharded(shapes: Mapping[str, Shape], ranks: int) -> tuple[dict[str, Placed], int]:
    """Stage 3: a parameter is cut into a part per rank, the last ones padded; a rank's parts of a
    sub-group's parameters make one vector, whose length is told too."""
    found = {}
    offset = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        part = -(-numel // ranks)
        places = [
            Place(rank, offset, offset + min(part, numel - rank * part))
            for rank in range(ranks)
            if rank * part < numel
        ]
        found[name] = Placed(tuple(shape), places)
        offset += part
    return found, offset


def require_same_account(
    placed: Mapping[str, Placed], mappings: Sequence[Mapping[str, Fragment]], folder: Path
) -> None:
    """DeepSpeed tells twice where parameters are: by the order of their shapes, and by each rank's
    fragments. Raises CheckpointError where these differ, since one must be wrong."""
    told: dict[str, list[Place]] = {name: [] for name in placed}
    for rank, mapping in enumerate(mappings):
        for name, fragment in mapping.items():
            place = Place(rank, fragment.start, fragment.start + fragment.numel)
            told.setdefault(name, []).append(place)
    for name, places in told.items():
        if name not in placed or places != list(placed[name].places):
            raise CheckpointError(
                f"{folder}: the files disagree on where {name} lies in the flat tensors; "
                "written by a version of DeepSpeed that is not known here"
            )


def reorders(config: Any) -> bool:
    """Whether parameters were dealt out in turn. DeepSpeed 0.19 then saves fragments as if they
    were not (`param_slice_mappings`), while the order of the shapes is right."""
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    return bool(zero.get("round_robin_gradients")) if isinstance(zero, Mapping) else False

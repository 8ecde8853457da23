"""Which rows of its sources a converted tensor is made of, found by converting row numbers.

Most conversions only move rows about: experts are stacked, projections fused, heads permuted. Then
a range of the result can be read as a few ranges of the sources, and nothing needs to be whole in
memory. The conversion itself tells: it is run on tensors that hold row numbers instead of values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pipeline.artifacts import TensorSpec
from stages.weights.change import Change

if TYPE_CHECKING:
    from torch import Tensor

WIDTH = 4
"""Columns of the tensors of row numbers: enough to see a conversion that moves columns."""
FACTOR, OFFSET = 3, 7


class Run(NamedTuple):
    """Elements [start, start + length) of a result are those of the flattened `source` from `at`
    on."""

    start: int
    source: str
    at: int
    length: int


Runs = Mapping[str, list[Run]]


def trace(
    change: Change, sources: Mapping[str, TensorSpec], results: Mapping[str, TensorSpec]
) -> Runs | None:
    """The runs that make up each result, in order; None for a conversion that does more than move
    whole rows of elements, or that casts them."""
    if any(not spec.shape or not spec.numel for spec in (*sources.values(), *results.values())):
        return None
    numbered, first_rows = _numbered(sources)
    try:
        found = change.convert(numbered)
        # Arithmetic would not commute with this.
        again = change.convert({n: FACTOR * t + OFFSET for n, t in numbered.items()})
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
    runs = {}
    for name, spec in results.items():
        rows = _rows(found.get(name), again.get(name), spec)
        made = None if rows is None else _runs(rows, first_rows, sources, spec)
        if made is None:
            return None
        runs[name] = made
    return runs


def _numbered(sources: Mapping[str, TensorSpec]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """For each source a tensor that is narrower and holds numbers that occur nowhere else, and the
    number of its first row, counted over all sources."""
    numbered, first_rows, next_row = {}, {}, 0
    for name, spec in sources.items():
        rows = math.prod(spec.shape[:-1])
        codes = torch.arange(next_row * WIDTH, (next_row + rows) * WIDTH)
        numbered[name] = codes.view(*spec.shape[:-1], WIDTH)
        first_rows[name] = next_row
        next_row += rows
    return numbered, first_rows


def _rows(
    found: Tensor | None, again: Tensor | None, spec: TensorSpec
) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
    """The row number that each row of a result came from; None if it is no such thing."""
    if found is None or again is None or tuple(found.shape) != (*spec.shape[:-1], WIDTH):
        return None
    codes = found.reshape(-1, WIDTH)
    first = codes[:, :1]
    moved_whole = torch.equal(codes, first + torch.arange(WIDTH)) and not bool(
        (first % WIDTH).any()
    )
    if not moved_whole or not torch.equal(again.reshape(-1, WIDTH), FACTOR * codes + OFFSET):
        return None
    return (first[:, 0] // WIDTH).numpy()


def _runs(
    rows: np.ndarray[tuple[int], np.dtype[np.int64]],
    first_rows: Mapping[str, int],
    sources: Mapping[str, TensorSpec],
    result: TensorSpec,
) -> list[Run] | None:
    names = list(first_rows)
    firsts = np.array([first_rows[name] for name in names])
    owner = np.searchsorted(firsts, rows, side="right") - 1
    breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(owner) != 0)) + 1
    starts = np.concatenate(([0], breaks))
    stops = np.concatenate((breaks, [len(rows)]))
    width = result.shape[-1]
    runs = []
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        name = names[int(owner[start])]
        if sources[name].shape[-1] != width or sources[name].dtype != result.dtype:
            return None
        at = int(rows[start]) - first_rows[name]
        runs.append(Run(start * width, name, at * width, (stop - start) * width))
    return runs

"""Which rows of its sources a converted tensor is made of, found by converting row numbers.

Most conversions only move rows about: experts are stacked, projections fused, heads permuted. Then
a range of the result can be read as a few ranges of the sources, and nothing needs to be whole in
memory. The conversion itself tells: it is run on tensors that hold row numbers instead of values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pipeline.contracts.tensors import TensorSpec
from stages.weights.change import Change

if TYPE_CHECKING:
    from torch import Tensor

WIDTHS = 5, 7
"""Columns of the tensors of row numbers in the first and in the second run. No part into which a
conversion can cut a row fits into both."""


class Run(NamedTuple):
    """Elements [start, start + length) of a result are those of the flattened `source` from `at`
    on."""

    start: int
    source: str
    at: int
    length: int


Runs = Mapping[str, list[Run]]


def trace(
    change: Change,
    sources: Mapping[str, TensorSpec],
    results: Mapping[str, TensorSpec],
    least: int = 0,
) -> Runs | None:
    """The runs that make up each result, in order; None for a conversion that does more than move
    whole rows of elements, or that casts them, and for one that scatters them into runs of less
    than `least` bytes on average."""
    if change.renames:
        return {name: [Run(0, change.sources[0], 0, spec.numel)] for name, spec in results.items()}
    if any(not spec.shape or not spec.numel for spec in (*sources.values(), *results.values())):
        return None
    first, second = (_numbered(sources, width) for width in WIDTHS)
    # What is computed of numbers is not what is computed of random ones that stand for them.
    random = _random(sum(numbers.numel() for numbers in second.values()))
    try:
        found = change.convert(first)
        again = change.convert({name: random[numbers] for name, numbers in second.items()})
    except Exception:  # converters differ in how they refuse tensors of another width
        return None
    runs = {}
    for name, spec in results.items():
        rows = _rows(found.get(name), again.get(name), random, spec)
        made = None if rows is None else _runs(rows, sources, spec, least)
        if made is None:
            return None
        runs[name] = made
    return runs


def _numbered(sources: Mapping[str, TensorSpec], width: int) -> dict[str, Tensor]:
    """For each source a tensor of so many columns that holds numbers that occur nowhere else."""
    return {
        name: _numbers(torch.arange(row, row + _row_count(spec)), width).view(
            *spec.shape[:-1], width
        )
        for (name, spec), row in zip(sources.items(), _first_rows(sources), strict=True)
    }


def _numbers(rows: Tensor, width: int) -> Tensor:
    """What stands in these rows, counted over all sources."""
    return rows[:, None] * width + torch.arange(width)


def _random(count: int) -> Tensor:
    return torch.randint(1 << 31, (count,), generator=torch.Generator().manual_seed(0))


def _row_count(spec: TensorSpec) -> int:
    return math.prod(spec.shape[:-1])


def _first_rows(sources: Mapping[str, TensorSpec]) -> list[int]:
    """The number of each source's first row."""
    counts = [_row_count(spec) for spec in sources.values()]
    return list(itertools.accumulate(counts, initial=0))[:-1]


def _rows(
    found: Tensor | None, again: Tensor | None, random: Tensor, spec: TensorSpec
) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
    """The number of the row that each row of a result came from; None if it is no such thing."""
    for tensor, width in zip((found, again), WIDTHS, strict=True):
        if tensor is None or tensor.dtype != torch.int64:
            return None
        if tuple(tensor.shape) != (*spec.shape[:-1], width):
            return None
    assert found is not None
    assert again is not None
    narrow, wide = WIDTHS
    rows = found.reshape(-1, narrow)[:, 0] // narrow
    if not torch.equal(found.reshape(-1, narrow), _numbers(rows, narrow)):
        return None
    numbers = _numbers(rows, wide)
    if numbers.min() < 0 or numbers.max() >= len(random):
        return None
    return rows.numpy() if torch.equal(again.reshape(-1, wide), random[numbers]) else None


def _runs(
    rows: np.ndarray[tuple[int], np.dtype[np.int64]],
    sources: Mapping[str, TensorSpec],
    result: TensorSpec,
    least: int,
) -> list[Run] | None:
    names, firsts = list(sources), _first_rows(sources)
    owner = np.searchsorted(firsts, rows, side="right") - 1
    breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(owner) != 0)) + 1
    starts = np.concatenate(([0], breaks))
    stops = np.concatenate((breaks, [len(rows)]))
    width = result.shape[-1]
    if len(starts) > 1 and result.nbytes / len(starts) < least:
        return None
    runs = []
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        place = int(owner[start])
        name = names[place]
        if sources[name].shape[-1] != width or sources[name].dtype != result.dtype:
            return None
        at = int(rows[start]) - firsts[place]
        runs.append(Run(start * width, name, at * width, (stop - start) * width))
    return runs

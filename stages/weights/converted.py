"""Another reader's tensors in another layout, made while they are read.

Most conversions only move rows: experts are stacked, projections fused, heads permuted. A range of
a result can then be read as a few ranges of the sources, and no tensor needs to be whole in memory.
Which rows go where is found by running the conversion on row numbers instead of values.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline import StageError, TensorReader, TensorSpec
from stages.weights.change import Change
from stages.weights.torch_files import named, pieces
from stages.weights.views import ReaderView

WORTHWHILE = 1 << 16
"""Bytes of a run, on average, below which whole tensors are converted instead."""
WIDTHS = 5, 7
"""Columns of the row numbers in the first and in the second run of a conversion. No part into which
a conversion can cut a row fits into both."""

Specs = Mapping[str, TensorSpec]
Rows = np.ndarray[tuple[int], np.dtype[np.int64]]


class Run(NamedTuple):
    """Elements [start, start + length) of a result: from `at` on in the flattened `source`."""

    start: int
    source: str
    at: int
    length: int


Runs = Mapping[str, list[Run]]


class ConvertedReader(ReaderView):
    """Results of `changes` on the tensors of `base`, which it closes. A range of a result whose
    rows are only moved is read from where they lie; others are converted whole, the latest kept."""

    def __init__(self, base: TensorReader, changes: Iterable[Change]) -> None:
        super().__init__(base)
        self._owner: dict[str, Change] = {}
        self._results: dict[Change, dict[str, TensorSpec]] = {}
        for change in changes:
            self._results[change] = self._outcome(change)
            for name in self._results[change]:
                if name in self._owner:
                    raise StageError(
                        f"both {_listed(self._owner[name])} and {_listed(change)} become {name}"
                    )
                self._owner[name] = change
        self._runs: dict[Change, Runs | None] = {}
        self._whole: tuple[Change, Mapping[str, Tensor]] | None = None

    def names(self) -> Collection[str]:
        return self._owner.keys()

    def spec(self, name: str) -> TensorSpec:
        return self._results[named(self._owner, name)][name]

    def sources(self, name: str) -> Sequence[str]:
        """Names in the base of the tensors that a result is made of."""
        return named(self._owner, name).sources

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        runs = self._runs_of(name)
        if runs is not None:
            for source, at, length in _between(runs, start, stop):
                yield from self._base.chunks(source, at, at + length)
            return
        change = self._owner[name]
        if self._whole is None or self._whole[0] is not change:
            self._whole = None  # frees the old ones before new ones are made
            made = change.convert({source: self._base.read(source) for source in change.sources})
            self._whole = (change, made)
        yield from pieces(self._whole[1][name], start, stop)

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        runs = self._runs_of(name)
        if runs is None:
            super().read_into(name, start, out)
            return
        done = 0
        for source, at, length in _between(runs, start, start + out.numel()):
            self._base.read_into(source, at, out[done : done + length])
            done += length

    def close(self) -> None:
        self._whole = None
        self._base.close()

    def _outcome(self, change: Change) -> dict[str, TensorSpec]:
        """Specs of the results, found without reading."""
        specs = {name: self._base.spec(name) for name in change.sources}
        empty = {n: torch.empty(s.shape, dtype=s.dtype, device="meta") for n, s in specs.items()}
        try:
            made = change.convert(empty)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise StageError(f"{_listed(change)} cannot be converted: {error}") from error
        return {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in made.items()}

    def _runs_of(self, name: str) -> list[Run] | None:
        """Runs of a result; None where whole tensors have to be converted, or should be."""
        change = named(self._owner, name)
        if change not in self._runs:
            sources = {source: self._base.spec(source) for source in change.sources}
            self._runs[change] = trace(change, sources, self._results[change], WORTHWHILE)
        found = self._runs[change]
        return None if found is None else found[name]


def _between(runs: list[Run], start: int, stop: int) -> Iterator[tuple[str, int, int]]:
    """(source, its first element, number of elements) that make up [start, stop) of a result."""
    place = max(bisect.bisect_right(runs, start, key=lambda run: run.start) - 1, 0)
    while start < stop:
        run = runs[place]
        skip = start - run.start
        length = min(run.length - skip, stop - start)
        yield run.source, run.at + skip, length
        start += length
        place += 1


def _listed(change: Change) -> str:
    return ", ".join(change.sources[:3]) + (" ..." if len(change.sources) > 3 else "")


def trace(change: Change, sources: Specs, results: Specs, least: int = 0) -> Runs | None:
    """The runs that make up each result, in order; None for a conversion that does more than move
    whole rows, and for runs of less than `least` bytes on average."""
    if change.renames:
        return {name: [Run(0, change.sources[0], 0, spec.numel)] for name, spec in results.items()}
    if any(not spec.shape or not spec.numel for spec in (*sources.values(), *results.values())):
        return None
    first, second = (_numbered(sources, width) for width in WIDTHS)
    # A result that is computed from numbers differs from one computed from random stand-ins.
    count = sum(numbers.numel() for numbers in second.values())
    random = torch.randint(1 << 31, (count,), generator=torch.Generator().manual_seed(0))
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


def _numbered(sources: Specs, width: int) -> dict[str, Tensor]:
    """For each source a tensor with `width` columns, of numbers that occur nowhere else."""
    ranges = zip(sources.items(), itertools.pairwise(_first_rows(sources)), strict=True)
    return {
        name: _numbers(torch.arange(*rows), width).view(*spec.shape[:-1], width)
        for (name, spec), rows in ranges
    }


def _numbers(rows: Tensor, width: int) -> Tensor:
    """Numbers of the elements in these rows, counted over all sources."""
    return rows[:, None] * width + torch.arange(width)


def _first_rows(sources: Specs) -> list[int]:
    """Number of each source's first row, and of the row behind the last."""
    counts = (math.prod(spec.shape[:-1]) for spec in sources.values())
    return list(itertools.accumulate(counts, initial=0))


def _rows(
    found: Tensor | None, again: Tensor | None, random: Tensor, spec: TensorSpec
) -> Rows | None:
    """The source row of each row of a result; None if its rows are not rows of the sources."""
    if found is None or again is None:
        return None
    for tensor, width in zip((found, again), WIDTHS, strict=True):
        if tensor.dtype != torch.int64 or tuple(tensor.shape) != (*spec.shape[:-1], width):
            return None
    narrow, wide = WIDTHS
    rows = found.reshape(-1, narrow)[:, 0] // narrow
    if not torch.equal(found.reshape(-1, narrow), _numbers(rows, narrow)):
        return None
    numbers = _numbers(rows, wide)
    if numbers.min() < 0 or numbers.max() >= len(random):
        return None
    return rows.numpy() if torch.equal(again.reshape(-1, wide), random[numbers]) else None


def _runs(rows: Rows, sources: Specs, result: TensorSpec, least: int) -> list[Run] | None:
    names, firsts = list(sources), _first_rows(sources)[:-1]
    owner = np.searchsorted(firsts, rows, side="right") - 1
    breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(owner) != 0)) + 1
    edges = [0, *breaks.tolist(), len(rows)]
    width = result.shape[-1]
    if len(breaks) and result.nbytes / (len(edges) - 1) < least:
        return None
    runs = []
    for start, stop in itertools.pairwise(edges):
        place = int(owner[start])
        source = sources[names[place]]
        if source.shape[-1] != width or source.dtype != result.dtype:
            return None
        at = int(rows[start]) - firsts[place]
        runs.append(Run(start * width, names[place], at * width, (stop - start) * width))
    return runs

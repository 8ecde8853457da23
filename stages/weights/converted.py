"""Another reader's tensors in another layout, made while they are read.

Most conversions only move rows: experts are stacked, projections fused, heads permuted. A range of
a result can then be read as a few ranges of the sources, and no tensor needs to be whole in memory.
Which rows go where is found by running the conversion on row numbers instead of values.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline import StageError, TensorReader, TensorSpec
from stages.weights.views import JoinedReader, named, pieces

WORTHWHILE = 1 << 16
"""Bytes of a run, on average, below which whole tensors are converted instead."""
WIDTHS = 5, 7
"""Columns of the row numbers in the first and in the second run of a conversion. No part into which
a conversion can cut a row fits into both."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Change:
    """Tensors that together become others: renamed, stacked, split, permuted, computed. `convert`
    takes all `sources` and returns the results by name. It depends only on shapes and dtypes,
    never on values, and also takes tensors on the meta device."""

    sources: Sequence[str]
    convert: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
    renames: bool = False
    """Whether it does nothing but rename one tensor."""

    def __str__(self) -> str:
        return ", ".join(self.sources[:3]) + (" ..." if len(self.sources) > 3 else "")


def renamed(old: str, new: str) -> Change:
    """Return the change of one tensor's name."""
    return Change(sources=(old,), convert=lambda tensors: {new: tensors[old]}, renames=True)


class Run(NamedTuple):
    """Elements [start, start + length) of a result: from `at` on in the flattened `source`."""

    start: int
    source: str
    at: int
    length: int


Specs = Mapping[str, TensorSpec]
Runs = Mapping[str, list[Run]]


class ConvertedReader(JoinedReader):
    """Results of `changes` on the tensors of `base`, which it closes. A range of a result whose
    rows are only moved is read from where they lie; others are converted whole, the latest kept."""

    def __init__(self, base: TensorReader, changes: Iterable[Change]) -> None:
        super().__init__(base)
        self._base, self.specs = base, {}
        self._change: dict[str, Change] = {}
        self._results: dict[Change, dict[str, TensorSpec]] = {}
        for change in changes:
            self._results[change] = {}
            held = {name: base.spec(name) for name in change.sources}
            empty = {n: torch.empty(s.shape, dtype=s.dtype, device="meta") for n, s in held.items()}
            try:
                made = change.convert(empty)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                raise StageError(f"{change} cannot be converted: {error}") from error
            for name, tensor in made.items():
                if name in self._change:
                    raise StageError(f"both {self._change[name]} and {change} become {name}")
                self._change[name] = change
                self._results[change][name] = TensorSpec(tuple(tensor.shape), tensor.dtype)
            self.specs |= self._results[change]
        self._runs: dict[Change, Runs | None] = {}
        self._whole: tuple[Change, Mapping[str, Tensor]] | None = None

    def sources(self, name: str) -> Sequence[str]:
        """Return the names in the base of the tensors that a result is made of."""
        return named(self._change, name).sources

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        moved = self._moved(name, start, stop)
        if moved is not None:
            for source, at, length in moved:
                yield from self._base.chunks(source, at, at + length)
            return
        change = self._change[name]
        if self._whole is None or self._whole[0] is not change:
            self._whole = None  # frees the old ones before new ones are made
            made = change.convert({source: self._base.read(source) for source in change.sources})
            self._whole = (change, made)
        yield from pieces(self._whole[1][name], start, stop)

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        moved, done = self._moved(name, start, start + out.numel()), 0
        if moved is None:
            TensorReader.read_into(self, name, start, out)
        for source, at, length in moved or ():
            self._base.read_into(source, at, out[done : done + length])
            done += length

    def close(self) -> None:
        self._whole = None
        super().close()

    def _moved(self, name: str, start: int, stop: int) -> list[tuple[str, int, int]] | None:
        """(source, its first element, number of elements) that make up [start, stop) of a result;
        None where whole tensors must be converted, or should be."""
        change = named(self._change, name)
        if change not in self._runs:
            sources = {source: self._base.spec(source) for source in change.sources}
            self._runs[change] = trace(change, sources, self._results[change], WORTHWHILE)
        traced = self._runs[change]
        if traced is None:
            return None
        runs, found = traced[name], []
        place = max(bisect.bisect_right(runs, start, key=lambda run: run.start) - 1, 0)
        while start < stop:
            run = runs[place]
            skip = start - run.start
            length = min(run.length - skip, stop - start)
            found.append((run.source, run.at + skip, length))
            start, place = start + length, place + 1
        return found


def trace(change: Change, sources: Specs, results: Specs, least: int = 0) -> Runs | None:
    """Return the runs that make up each result, in order; None for a conversion that does more than
    move whole rows, and for runs of less than `least` bytes on average."""
    if change.renames:
        return {name: [Run(0, change.sources[0], 0, spec.numel)] for name, spec in results.items()}
    if any(not spec.shape or not spec.numel for spec in (*sources.values(), *results.values())):
        return None
    counts = (math.prod(spec.shape[:-1]) for spec in sources.values())
    edges = list(itertools.accumulate(counts, initial=0))
    # For each width a stand-in of each source, whose elements are numbers that occur nowhere else.
    first, second = (
        {
            name: _numbers(torch.arange(*rows), width).view(*spec.shape[:-1], width)
            for (name, spec), rows in zip(sources.items(), itertools.pairwise(edges), strict=True)
        }
        for width in WIDTHS
    )
    # A result that is computed from numbers differs from one computed from random stand-ins.
    random = torch.randint(
        1 << 31, (edges[-1] * WIDTHS[1],), generator=torch.Generator().manual_seed(0)
    )
    try:
        found = change.convert(first)
        again = change.convert({name: random[numbers] for name, numbers in second.items()})
    except Exception:  # converters differ in how they refuse tensors of another width
        return None
    names, runs = list(sources), dict[str, list[Run]]()
    for name, spec in results.items():
        rows = _rows((found.get(name), again.get(name)), random, spec)
        if rows is None:
            return None
        owner = np.searchsorted(edges[:-1], rows, side="right") - 1
        breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(owner) != 0)) + 1
        if len(breaks) and spec.nbytes / (len(breaks) + 1) < least:
            return None
        runs[name] = []
        for start, stop in itertools.pairwise([0, *breaks.tolist(), len(rows)]):
            source, width = names[owner[start]], spec.shape[-1]
            if (sources[source].shape[-1], sources[source].dtype) != (width, spec.dtype):
                return None
            at = int(rows[start]) - edges[owner[start]]
            runs[name].append(Run(start * width, source, at * width, (stop - start) * width))
    return runs


def _numbers(rows: Tensor, width: int) -> Tensor:
    """Numbers of the elements in these rows, counted over all sources."""
    return rows[:, None] * width + torch.arange(width)


def _rows(made: tuple[Tensor | None, ...], random: Tensor, spec: TensorSpec) -> Any:
    """The source row of each row of a result, which was `made` of numbers and of random stand-ins;
    None if its rows are not rows of the sources."""
    flat = []
    for tensor, width in zip(made, WIDTHS, strict=True):
        if tensor is None or tensor.dtype != torch.int64:
            return None
        if tuple(tensor.shape) != (*spec.shape[:-1], width):
            return None
        flat.append(tensor.reshape(-1, width))
    (found, again), (narrow, wide) = flat, WIDTHS
    rows = found[:, 0] // narrow
    if not torch.equal(found, _numbers(rows, narrow)):
        return None
    numbers = _numbers(rows, wide)
    if numbers.min() < 0 or numbers.max() >= len(random):
        return None
    return rows.numpy() if torch.equal(again, random[numbers]) else None

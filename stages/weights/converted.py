"""Another reader's tensors in another layout, made while they are read."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from pipeline.contracts.tensors import TensorReader, TensorSpec
from pipeline.errors import StageError
from stages.weights.change import Change
from stages.weights.provenance import Run, Runs, trace
from stages.weights.torch_files import pieces
from stages.weights.views import ReaderView

if TYPE_CHECKING:
    from torch import Tensor

WORTHWHILE = 1 << 16
"""Bytes; shorter runs are not read one by one."""


class ConvertedReader(ReaderView):
    """What `changes` make of the tensors of `base`, which it closes.

    Where a change only moves rows, any range is read from where it lies. Where it does more, its
    tensors are converted whole, and the results of the latest change are kept.
    """

    def __init__(self, base: TensorReader, changes: Iterable[Change]) -> None:
        super().__init__(base)
        self._owner: dict[str, Change] = {}
        self._specs: dict[str, TensorSpec] = {}
        self._results: dict[Change, dict[str, TensorSpec]] = {}
        for change in changes:
            self._results[change] = self._outcome(change)
            for name, spec in self._results[change].items():
                if name in self._owner:
                    raise StageError(
                        f"both {_listed(self._owner[name])} and {_listed(change)} become {name}"
                    )
                self._owner[name] = change
                self._specs[name] = spec
        self._runs: dict[Change, Runs | None] = {}
        self._whole: tuple[Change, Mapping[str, Tensor]] | None = None

    def names(self) -> Collection[str]:
        return self._owner.keys()

    def spec(self, name: str) -> TensorSpec:
        if name not in self._specs:
            raise StageError(f"no tensor named {name}")
        return self._specs[name]

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        runs = self._runs_of(name)
        if runs is None:
            yield from pieces(self._converted(name), start, stop)
            return
        for source, at, length in _between(runs, start, stop):
            yield from self._base.chunks(source, at, at + length)

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
        """What the change makes, without reading."""
        specs = {name: self._base.spec(name) for name in change.sources}
        empty = {n: torch.empty(s.shape, dtype=s.dtype, device="meta") for n, s in specs.items()}
        try:
            made = change.convert(empty)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise StageError(f"{_listed(change)} cannot be converted: {error}") from error
        return {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in made.items()}

    def _runs_of(self, name: str) -> list[Run] | None:
        """None where it is better, or only possible, to convert whole tensors."""
        self.spec(name)
        change = self._owner[name]
        if change not in self._runs:
            sources = {source: self._base.spec(source) for source in change.sources}
            results = self._results[change]
            self._runs[change] = trace(change, sources, results, WORTHWHILE)
        found = self._runs[change]
        return None if found is None else found[name]

    def _converted(self, name: str) -> Tensor:
        change = self._owner[name]
        if self._whole is None or self._whole[0] is not change:
            self._whole = None  # frees the old ones before new ones are made
            made = change.convert({source: self._base.read(source) for source in change.sources})
            self._whole = (change, made)
        return self._whole[1][name]


def _between(runs: list[Run], start: int, stop: int) -> Iterator[tuple[str, int, int]]:
    """(source, first element of it, elements) that make up [start, stop) of a result."""
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

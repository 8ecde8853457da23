"""A reader's tensors with some of their rows from another."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from pipeline.artifacts import TensorReader, TensorSpec
from pipeline.errors import StageError
from stages.weights.view import ReaderView

if TYPE_CHECKING:
    from torch import Tensor


class Origin(NamedTuple):
    """A tensor whose first `kept` elements are those of `source` in the base, and whose others are
    those of the same place in the fresh reader."""

    source: str
    kept: int
    spec: TensorSpec


class ExtendedReader(ReaderView):
    """Tensors of `base` by the names in `origins`, with what they lack from `fresh`. Closes both.

    A tensor with nothing from the base has the dtype of the fresh one.
    """

    def __init__(
        self, base: TensorReader, fresh: TensorReader | None, origins: Mapping[str, Origin]
    ) -> None:
        super().__init__(base)
        self._fresh = fresh
        self._origins = origins

    def names(self) -> Collection[str]:
        return self._origins.keys()

    def spec(self, name: str) -> TensorSpec:
        return self._origin(name).spec

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        origin = self._origin(name)
        edge = min(max(origin.kept, start), stop)
        if start < edge:
            yield from self._base.chunks(origin.source, start, edge)
        yield from self._new(name, edge, stop)

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        origin = self._origin(name)
        kept = min(max(origin.kept - start, 0), out.numel())
        if kept:
            self._base.read_into(origin.source, start, out[:kept])
        for chunk in self._new(name, start + kept, start + out.numel()):
            out[kept : kept + chunk.numel()].copy_(chunk)
            kept += chunk.numel()

    def close(self) -> None:
        self._base.close()
        if self._fresh is not None:
            self._fresh.close()

    def _new(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        if start < stop:
            assert self._fresh is not None
            for chunk in self._fresh.chunks(name, start, stop):
                yield chunk.to(self._origins[name].spec.dtype)

    def _origin(self, name: str) -> Origin:
        if name not in self._origins:
            raise StageError(f"no tensor named {name}")
        return self._origins[name]

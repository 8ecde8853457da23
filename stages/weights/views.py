"""Tensors in memory, and readers of other readers' tensors: joined, cast, computed, extended."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from pipeline import StageError, TensorReader, TensorSpec, Weights
from pipeline.checkpoint import CHUNK

T = TypeVar("T")


def named(table: Mapping[str, T], name: str) -> T:
    """Return the entry of a tensor. Raises StageError if there is none."""
    if name not in table:
        raise StageError(f"no tensor named {name}")
    return table[name]


def pieces(tensor: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """Yield elements [start, stop) of a tensor, flattened, in pieces of a few MiB."""
    whole = tensor.contiguous()
    flat = whole.as_strided((whole.numel(),), (1,))  # one element can have any stride
    step = max(CHUNK // tensor.element_size(), 1)
    for first in range(start, stop, step):
        yield flat[first : min(first + step, stop)]


class ListedReader(TensorReader):
    """Tensors whose specs are known from the start."""

    specs: dict[str, TensorSpec]

    def names(self) -> Collection[str]:
        return self.specs.keys()

    def spec(self, name: str) -> TensorSpec:
        return named(self.specs, name)


class MemoryReader(ListedReader):
    """Tensors of a state dict."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self.specs = {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in tensors.items()}

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        yield from pieces(named(self._tensors, name).detach(), start, stop)

    def close(self) -> None:
        self._tensors.clear()
        self.specs.clear()


class JoinedReader(ListedReader):
    """Tensors of all `readers`, which it closes; for a name in several, the first reader's."""

    closes: Sequence[TensorReader | ExitStack]
    """What `close` closes, in order."""

    def __init__(self, *readers: TensorReader) -> None:
        self.closes = self._readers = readers
        self.as_stored = all(reader.as_stored for reader in readers)
        self._owner = {name: reader for reader in reversed(readers) for name in reader.names()}
        self.specs = {name: reader.spec(name) for name, reader in self._owner.items()}

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        return sum(reader.bytes_read for reader in self._readers)

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        return named(self._owner, name).chunks(name, start, stop)

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        named(self._owner, name).read_into(name, start, out)

    def close(self) -> None:
        for each in self.closes:
            each.close()


class CompletedWeights(JoinedReader, Weights):
    """Trained weights, left open, and the tensors `names` of `source`, which it closes."""

    def __init__(self, trained: Weights, source: TensorReader, names: Collection[str]) -> None:
        super().__init__(trained, source)
        self.identity, self.closes = trained.identity, [source]
        kept = {*trained.names(), *names}
        self.specs = {name: spec for name, spec in self.specs.items() if name in kept}
        self._owner = {name: self._owner[name] for name in self.specs}


class ComputedReader(JoinedReader):
    """Tensors of `base`, which it closes, except those that `computed` says the specs of: `compute`
    yields their elements [start, stop). `names` are in the place of the base's."""

    def __init__(
        self,
        base: TensorReader,
        computed: Mapping[str, TensorSpec],
        compute: Callable[[str, int, int], Iterator[Tensor]],
        names: Collection[str] | None = None,
    ) -> None:
        super().__init__(base)
        self.as_stored = False  # computing takes longer than sending the result
        self._computed, self._compute = computed, compute
        order = base.names() if names is None else names
        self.specs = {name: computed.get(name) or self.specs[name] for name in order}

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        return (self._compute if name in self._computed else super().chunks)(name, start, stop)

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        kind = TensorReader if name in self._computed else JoinedReader
        kind.read_into(self, name, start, out)


def cast_reader(base: TensorReader, dtype: Callable[[str], torch.dtype]) -> ComputedReader:
    """Return the floating tensors of `base`, which stays open, in the dtype that `dtype` returns
    for their name, others unchanged. Reading raises StageError for finite values that become
    infinite."""
    specs = {name: base.spec(name) for name in base.names()}
    floats = (name for name, spec in specs.items() if spec.dtype.is_floating_point)
    wanted = {name: specs[name]._replace(dtype=dtype(name)) for name in floats}
    changed = {name: spec for name, spec in wanted.items() if spec != specs[name]}

    def compute(name: str, start: int, stop: int) -> Iterator[Tensor]:
        dtype = changed[name].dtype
        for chunk in base.chunks(name, start, stop):
            if (most := torch.finfo(dtype).max) < 1e38:
                values = chunk.float().abs()
                if ((values > most) & values.isfinite()).any():
                    raise StageError(
                        f"{name} has values beyond {str(dtype).removeprefix('torch.')}",
                        hint="export in bf16 or fp32",
                    )
            yield chunk.to(dtype)

    reader = ComputedReader(base, changed, compute)
    reader.closes = ()
    return reader


class Origin(NamedTuple):
    """A tensor whose first `kept` elements are `source`'s in the base; the others come from the
    same place in the fresh reader."""

    source: str
    kept: int
    spec: TensorSpec


class ExtendedReader(JoinedReader):
    """Tensors of `base` by the names in `origins`, extended by rows of `fresh`; closes both. A
    tensor without elements of the base has the dtype of the fresh one."""

    def __init__(
        self, base: TensorReader, fresh: TensorReader | None, origins: Mapping[str, Origin]
    ) -> None:
        super().__init__(base)
        self._base, self._fresh, self._origins = base, fresh, origins
        self.specs = {name: origin.spec for name, origin in origins.items()}
        self.closes = [base] if fresh is None else [base, fresh]

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        origin = named(self._origins, name)
        edge = min(max(origin.kept, start), stop)
        if start < edge:
            yield from self._base.chunks(origin.source, start, edge)
        if edge < stop:
            assert self._fresh is not None
            for chunk in self._fresh.chunks(name, edge, stop):
                yield chunk.to(origin.spec.dtype)

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        origin = named(self._origins, name)
        kept = min(max(origin.kept - start, 0), out.numel())
        if kept:
            self._base.read_into(origin.source, start, out[:kept])
        TensorReader.read_into(self, name, start + kept, out[kept:])

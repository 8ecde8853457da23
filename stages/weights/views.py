"""Readers of other readers' tensors: cast, joined, computed, or with further rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline import StageError, TensorReader, TensorSpec, Weights
from stages.weights.torch_files import named


class ReaderView(TensorReader):
    """A view of the tensors of `base` and others, which it leaves open. It has read what they
    have."""

    def __init__(self, base: TensorReader, *others: TensorReader) -> None:
        self._base = base
        self._bases = (base, *others)

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        return sum(reader.bytes_read for reader in self._bases)

    @property
    def as_stored(self) -> bool:  # type: ignore[override]
        return all(reader.as_stored for reader in self._bases)


class CastReader(ReaderView):
    """Floating tensors of `base` in the dtype that `dtype` returns for their name, others
    unchanged. Raises StageError for finite values that become infinite."""

    def __init__(self, base: TensorReader, dtype: Callable[[str], torch.dtype]) -> None:
        super().__init__(base)
        self._dtype = dtype

    def names(self) -> Collection[str]:
        return self._base.names()

    def spec(self, name: str) -> TensorSpec:
        spec = self._base.spec(name)
        return spec._replace(dtype=self._dtype(name)) if spec.dtype.is_floating_point else spec

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        dtype = self.spec(name).dtype
        for chunk in self._base.chunks(name, start, stop):
            if chunk.dtype != dtype and _overflows(chunk, dtype):
                raise StageError(
                    f"{name} has values beyond {str(dtype).removeprefix('torch.')}",
                    hint="export in bf16 or fp32",
                )
            yield chunk.to(dtype)

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        if self._base.spec(name).dtype == self.spec(name).dtype:
            self._base.read_into(name, start, out)
        else:
            super().read_into(name, start, out)


def _overflows(chunk: Tensor, dtype: torch.dtype) -> bool:
    """Whether the dtype cannot hold a finite value; False for dtypes with the range of fp32."""
    most = torch.finfo(dtype).max
    if most > 1e38:
        return False
    values = chunk.float().abs()
    return bool(((values > most) & values.isfinite()).any())


class JoinedReader(ReaderView):
    """Tensors of both readers, which it closes; those of `base` come first."""

    def __init__(self, base: TensorReader, other: TensorReader) -> None:
        super().__init__(base, other)
        self._owner = dict.fromkeys(other.names(), other) | dict.fromkeys(base.names(), base)

    def names(self) -> Collection[str]:
        return self._owner.keys()

    def spec(self, name: str) -> TensorSpec:
        return named(self._owner, name).spec(name)

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        return named(self._owner, name).chunks(name, start, stop)

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        named(self._owner, name).read_into(name, start, out)

    def close(self) -> None:
        for reader in self._bases:
            reader.close()


class CompletedWeights(JoinedReader, Weights):
    """Trained weights, which it leaves open, and the tensors `names` of `source`, which it
    closes."""

    def __init__(self, trained: Weights, source: TensorReader, names: Collection[str]) -> None:
        super().__init__(trained, source)
        self.identity = trained.identity
        kept = {*trained.names(), *names}
        self._owner = {name: one for name, one in self._owner.items() if name in kept}

    def close(self) -> None:
        self._bases[1].close()


class ComputedReader(TensorReader):
    """Tensors of `others`, some of which are replaced by tensors computed chunk by chunk."""

    @property
    @abstractmethod
    def others(self) -> TensorReader:
        """Reader of the tensors that are not computed."""

    @abstractmethod
    def computes(self, name: str) -> bool:
        """Whether the tensor is computed."""

    @abstractmethod
    def computed(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        """Like `chunks`, for a computed tensor."""

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        return self.others.bytes_read

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        reader = self.computed if self.computes(name) else self.others.chunks
        yield from reader(name, start, stop)

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        if self.computes(name):
            super().read_into(name, start, out)
        else:
            self.others.read_into(name, start, out)


class Origin(NamedTuple):
    """A tensor whose first `kept` elements are those of `source` in the base; the others come from
    the same place in the fresh reader."""

    source: str
    kept: int
    spec: TensorSpec


class ExtendedReader(ReaderView):
    """Tensors of `base` by the names in `origins`, extended by rows of `fresh`; closes both. A
    tensor of which nothing comes from the base has the dtype of the fresh one."""

    def __init__(
        self, base: TensorReader, fresh: TensorReader | None, origins: Mapping[str, Origin]
    ) -> None:
        super().__init__(base)
        self._fresh = fresh
        self._origins = origins

    def names(self) -> Collection[str]:
        return self._origins.keys()

    def spec(self, name: str) -> TensorSpec:
        return named(self._origins, name).spec

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        origin = named(self._origins, name)
        edge = min(max(origin.kept, start), stop)
        if start < edge:
            yield from self._base.chunks(origin.source, start, edge)
        yield from self._new(name, edge, stop)

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        origin = named(self._origins, name)
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

"""Readers: named tensors that lie elsewhere, read range by range."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, NamedTuple

from pipeline.errors import StageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class TensorSpec(NamedTuple):
    """Facts of a tensor that are known without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.numel * self.dtype.itemsize


class TensorReader(ABC):
    """Named tensors stored elsewhere; any range of one can be read."""

    bytes_read: int = 0
    """Bytes of tensors that were read from files so far."""
    as_stored: bool = False
    """Whether values are read from files unchanged: reading again is a copy from the page cache."""

    @abstractmethod
    def names(self) -> Collection[str]:
        """Names as in the model's state dict, of tied tensors one or all."""

    @abstractmethod
    def spec(self, name: str) -> TensorSpec:
        """Full shape and stored dtype. Raises StageError if `name` is not there."""

    @abstractmethod
    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        """Elements [start, stop) of the flattened tensor, in order, as flat tensors of a few MiB on
        the CPU in the stored dtype, each valid until the next is taken. Raises StageError."""

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill the flat tensor `out`, of any dtype and device, with the elements from `start` on of
        the flattened tensor, cast to its dtype. Raises StageError."""
        done = 0
        for chunk in self.chunks(name, start, start + out.numel()):
            out[done : done + chunk.numel()].copy_(chunk)
            done += chunk.numel()
        if done != out.numel():
            raise StageError(f"{name}: {done} elements came where {out.numel()} were asked for")

    def read(self, name: str) -> Tensor:
        """The full tensor in its stored dtype. Raises StageError if `name` is not there."""
        import torch

        spec = self.spec(name)
        flat = torch.empty(spec.numel, dtype=spec.dtype)
        self.read_into(name, 0, flat)
        return flat.view(spec.shape)

    def close(self) -> None:
        """Release files and caches."""


class Weights(TensorReader):
    """Named full tensors of the trained model, streamed from a checkpoint, never all in memory."""

    identity: str
    """Equal for equal contents; an interrupted export continues only with the same identity."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.names():
            yield name, self.read(name)

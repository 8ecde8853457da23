"""Tensors that are in memory, or mapped into it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from pipeline.artifacts import TensorReader, TensorSpec
from pipeline.errors import StageError
from pipeline.state.blocks import CHUNK

if TYPE_CHECKING:
    from torch import Tensor


class MemoryReader(TensorReader):
    """Tensors of a state dict."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def spec(self, name: str) -> TensorSpec:
        tensor = self._tensor(name)
        return TensorSpec(tuple(tensor.shape), tensor.dtype)

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        yield from pieces(self._tensor(name), start, stop)

    def close(self) -> None:
        self._tensors.clear()

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise StageError(f"no tensor named {name}")
        return self._tensors[name].detach()


def pieces(tensor: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """Elements [start, stop) of a tensor, flattened, in pieces of a few MiB."""
    whole = tensor.contiguous()
    flat = whole.as_strided((whole.numel(),), (1,))  # one element can have any stride
    step = max(CHUNK // tensor.element_size(), 1)
    for first in range(start, stop, step):
        yield flat[first : min(first + step, stop)]

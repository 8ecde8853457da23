"""Weights of a trained model, in memory, for tests."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import Tensor

from pipeline.contracts.model import ModelSource, TensorSpec, Weights
from stages.weights.views import MemoryReader


class MemoryWeights(MemoryReader, Weights):
    """Tensors from a dict, which tests may change; records the names that are read."""

    identity = "memory"

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.tensors = self._tensors
        self.reads: list[str] = []

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def spec(self, name: str) -> TensorSpec:
        return MemoryReader(self.tensors).spec(name)

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        self.reads.append(name)
        yield from super().chunks(name, start, stop)


def trained(source: ModelSource) -> MemoryWeights:
    """Return the source's weights in fp32, each changed a little from its initial values."""
    reader = source.weights()
    return MemoryWeights(
        {name: reader.read(name).float() * 1.01 + 0.003 for name in reader.names()}
    )

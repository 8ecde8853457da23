"""Weights of a trained model, in memory, for tests."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from pipeline.artifacts import ModelSource, Weights


class MemoryWeights(Weights):
    """Tensors from a dict; keeps count of reads."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self.reads: list[str] = []

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def read(self, name: str) -> Tensor:
        self.reads.append(name)
        return self.tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)


def trained(source: ModelSource) -> MemoryWeights:
    """The source's weights in fp32, each nudged so that they differ from the initial ones."""
    reader = source.weights()
    return MemoryWeights(
        {name: reader.read(name).float() * 1.01 + 0.003 for name in reader.names()}
    )

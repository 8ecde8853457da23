"""A model whose weights are not read."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from pipeline.artifacts import ModelSource, TensorReader, TensorSpec


def unread(source: ModelSource) -> ModelSource:
    """The same, with a reader of zeros."""
    same = copy.copy(source)
    same.weights = NoValues  # type: ignore[method-assign]
    return same


class NoValues(TensorReader):
    """Has every tensor, and reads none. All are zeros: with what happens to be in memory, gradients
    might not be finite, and some strategies leave such updates out."""

    as_stored = True

    def names(self) -> Collection[str]:
        return ()

    def spec(self, name: str) -> TensorSpec:
        return TensorSpec(shape=(), dtype=torch.float32)

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        return iter(())

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        out.zero_()

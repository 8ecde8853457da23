"""What readers have in common that compute some tensors and pass on the others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeline.artifacts import TensorReader

if TYPE_CHECKING:
    from torch import Tensor


class ComputedReader(TensorReader):
    """Tensors of `others`, but for those that are computed, chunk by chunk."""

    @property
    @abstractmethod
    def others(self) -> TensorReader:
        """Has what is not computed."""

    @abstractmethod
    def computes(self, name: str) -> bool:
        """Whether it is computed."""

    @abstractmethod
    def computed(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        """As `chunks`, of a tensor that is computed."""

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        """Of the others, which the computed ones are made from."""
        return self.others.bytes_read

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        reader = self.computed if self.computes(name) else self.others.chunks
        yield from reader(name, start, stop)

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        if self.computes(name):
            super().read_into(name, start, out)
        else:
            self.others.read_into(name, start, out)

"""Another reader's tensors in other dtypes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from pipeline.artifacts import TensorReader, TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class CastReader(TensorReader):
    """Floating tensors of `base` in the dtype that `dtype` gives their name; others as they are.
    Leaves `base` open."""

    def __init__(self, base: TensorReader, dtype: Callable[[str], torch.dtype]) -> None:
        self._base = base
        self._dtype = dtype

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        """Of the base."""
        return self._base.bytes_read

    def names(self) -> Collection[str]:
        return self._base.names()

    def spec(self, name: str) -> TensorSpec:
        spec = self._base.spec(name)
        return spec._replace(dtype=self._dtype(name)) if spec.dtype.is_floating_point else spec

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        dtype = self.spec(name).dtype
        for chunk in self._base.chunks(name, start, stop):
            yield chunk.to(dtype)

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        dtype = self.spec(name).dtype
        if out.dtype == dtype:
            self._base.read_into(name, start, out)
        else:
            super().read_into(name, start, out)

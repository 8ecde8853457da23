"""Another reader's tensors in other dtypes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

import torch

from pipeline.artifacts import TensorReader, TensorSpec
from pipeline.errors import StageError
from stages.weights.view import ReaderView

if TYPE_CHECKING:
    from torch import Tensor


class CastReader(ReaderView):
    """Floating tensors of `base` in the dtype that `dtype` gives their name; others as they are.

    Raises StageError for finite values that become infinite. Leaves `base` open.
    """

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
    """Whether there are finite values that the dtype does not reach; not asked of dtypes that reach
    as far as fp32."""
    most = torch.finfo(dtype).max
    if most > 1e38:
        return False
    values = chunk.float().abs()
    return bool(((values > most) & values.isfinite()).any())

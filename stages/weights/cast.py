"""Another reader's tensors in other dtypes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from pipeline.artifacts import TensorReader, TensorSpec
from pipeline.errors import StageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class CastReader(TensorReader):
    """Floating tensors of `base` in the dtype that `dtype` gives their name; others as they are.

    Raises StageError for finite values that become infinite. Leaves `base` open.
    """

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
            made = chunk.to(dtype)
            if made.dtype != chunk.dtype and _overflows(chunk, made):
                raise StageError(
                    f"{name} has values beyond {str(dtype).removeprefix('torch.')}",
                    hint="export in bf16 or fp32",
                )
            yield made


def _overflows(before: Tensor, after: Tensor) -> bool:
    """Whether there are finite values that the dtype does not reach; not asked of dtypes that reach
    as far as fp32."""
    import torch

    most = torch.finfo(after.dtype).max
    if most > 1e38:
        return False
    values = before.float().abs()
    return bool(((values > most) & values.isfinite()).any())

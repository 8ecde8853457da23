"""Torch tensors: shards of distributed ones, ones without values, copies to the host."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """This process's shard of a DTensor, differentiable; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_chunk(total: int, mesh: DeviceMesh) -> range:
    """Rows of `total` that this process has on a mesh of one axis, by torch.chunk's rule."""
    size = -(-total // mesh.size())
    first = min(size * mesh.get_local_rank(), total)
    return range(first, min(first + size, total))


without_values = functools.partial(FakeTensorMode, allow_non_fake_inputs=True)
"""Inside, tensors that are made have shapes and no values."""


def with_values() -> AbstractContextManager[Any]:
    """Inside, tensors are real in a trace too: tensors that say which ranks there are, and the
    buffers of a model without memory."""
    return unset_fake_temporarily()


def has_values(tensor: Tensor) -> bool:
    """Whether it was made outside of `without_values`."""
    return not isinstance(tensor, FakeTensor)


def device_of(tensor: Tensor) -> torch.device:
    """Device of a tensor; asking a fake tensor for it is slow."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


class HostCopy:
    """A copy of a small tensor that the device sends to the host once it has computed it, so that
    the host can continue until it needs the numbers."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._sent = values, None
        if values.is_cuda:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent.record()

    def __float__(self) -> float:
        """The only element, as `read` returns it."""
        (value,) = self.read()
        return value

    def read(self) -> list[float]:
        """Return all elements. The host waits if the device has not computed them."""
        if self._sent is not None:
            self._sent.synchronize()
        found: list[float] = self._values.reshape(-1).tolist()
        return found

"""Tensors without values; a test guards torch's names."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily


def without_values() -> AbstractContextManager[Any]:
    """Inside, tensors that are made have shapes and no values."""
    return FakeTensorMode(allow_non_fake_inputs=True)


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

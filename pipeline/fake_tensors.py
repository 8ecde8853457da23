"""Tensors without values, and operations that they cannot answer; a test guards torch's names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)

from pipeline.errors import StageError


def without_values() -> AbstractContextManager[Any]:
    """Inside, tensors that are made have shapes and no values."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def with_values() -> AbstractContextManager[Any]:
    """Inside, tensors are real in a trace too: those that say which ranks there are, and the
    buffers of a model without memory."""
    return unset_fake_temporarily()


def has_values(tensor: Tensor) -> bool:
    """Whether it was made outside of `without_values`."""
    return not isinstance(tensor, FakeTensor)


def device_of(tensor: Tensor) -> torch.device:
    """Its device, which a tensor without values tells slowly."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


@contextlib.contextmanager
def told_apart() -> Iterator[None]:
    """Raises StageError where the body needs values."""
    try:
        yield
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    ) as error:
        raise StageError(
            f"this cannot be traced: it came to {error}, whose result depends on values, and "
            "tensors have none in a trace",
            hint="leave out --trace",
        ) from error

"""Readers of tensors: random tensors, random ranges, and properties of every reader."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from pipeline.checkpoint.write_plan import CODES
from pipeline.contracts.model import TensorReader, TensorSpec

SIDES = st.integers(0, 6)
SHAPES = st.lists(SIDES, max_size=4).map(tuple)
DTYPES = st.sampled_from(list(CODES))
FLOATS = st.sampled_from([dtype for dtype in CODES if dtype.is_floating_point])


def random_bits(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return a tensor of random bits: of a floating dtype, some are infinite or not numbers."""
    generator = torch.Generator().manual_seed(seed)
    size = math.prod(shape) * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    bits = torch.randint(0, high, (size,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).view(tuple(shape))


@st.composite
def tensors(draw: Any, dtypes: Any = DTYPES, shapes: Any = SHAPES) -> Tensor:
    """Draw random bits in a random dtype and shape."""
    return random_bits(draw(shapes), draw(dtypes), draw(st.integers(0, 2**32)))


@st.composite
def ranges(draw: Any, numel: int) -> tuple[int, int]:
    """Draw any [start, stop) within a tensor, also an empty one."""
    start = draw(st.integers(0, numel))
    return start, draw(st.integers(start, numel))


def raw(tensor: Tensor) -> bytes:
    """Return its elements in order, as bytes, which distinguish one NaN from another."""
    if not tensor.numel():
        return b""  # an empty tensor can have any stride
    flat = tensor.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes()


def chunked(reader: TensorReader, name: str, start: int, stop: int) -> bytes:
    """Read a range through `chunks`."""
    return b"".join(raw(chunk.clone()) for chunk in reader.chunks(name, start, stop))


def filled(reader: TensorReader, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Read a range through `read_into`, into the middle of other memory, which must not change."""
    memory = torch.ones(stop - start + 2, dtype=dtype)
    reader.read_into(name, start, memory[1:-1])
    assert raw(memory[:: stop - start + 1]) == raw(torch.ones(2, dtype=dtype))
    return memory[1:-1]


def require_equal(reader: TensorReader, expected: Mapping[str, Tensor]) -> None:
    """Require all of the names, and every tensor whole, bit for bit."""
    assert sorted(reader.names()) == sorted(expected)
    for name, tensor in expected.items():
        assert reader.spec(name) == TensorSpec(tuple(tensor.shape), tensor.dtype), name
        read = reader.read(name)
        assert (read.shape, read.dtype) == (tensor.shape, tensor.dtype), name
        assert raw(read) == raw(tensor), name


def require_range(reader: TensorReader, name: str, tensor: Tensor, span: tuple[int, int]) -> None:
    """Require a range by every way of reading it in the stored dtype, bit for bit."""
    start, stop = span
    flat = raw(tensor)[start * tensor.element_size() : stop * tensor.element_size()]
    assert chunked(reader, name, start, stop) == flat, (name, span)
    assert raw(filled(reader, name, start, stop, tensor.dtype)) == flat, (name, span)


def require_cast(
    reader: TensorReader, name: str, tensor: Tensor, span: tuple[int, int], dtype: torch.dtype
) -> None:
    """Require that a range read into memory of another dtype has the values of the cast tensor."""
    found = filled(reader, name, *span, dtype)
    flat = tensor.contiguous().view(-1)[slice(*span)].to(dtype)
    assert found.dtype == dtype
    same = (found == flat) | (found.double().isnan() & flat.double().isnan())
    assert bool(same.all()), (name, span, dtype)

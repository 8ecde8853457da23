"""Readers that are views on memory and on other readers: other dtypes, other rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeline.contracts.model import TensorSpec
from pipeline.errors import StageError
from stages.weights.views import (
    ComputedReader,
    ExtendedReader,
    JoinedReader,
    MemoryReader,
    Origin,
    cast_reader,
)
from tests.support.readers import (
    FLOATS,
    chunked,
    random_bits,
    ranges,
    raw,
    require_cast,
    require_equal,
    require_range,
    tensors,
)

VIEWS = {
    "as it is": lambda t: t,
    "transposed": lambda t: t.movedim(0, -1) if t.ndim else t,
    "every other": lambda t: t[::2] if t.ndim else t,
    "expanded": lambda t: t[None].expand(3, *t.shape),
    "a parameter": lambda t: torch.nn.Parameter(t, requires_grad=t.is_floating_point()),
}


class Counting(MemoryReader):
    """Counts reads, and records whether it was closed."""

    closed = False

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        for chunk in super().chunks(name, start, stop):
            self.bytes_read += chunk.nbytes
            yield chunk

    def close(self) -> None:
        self.closed = True


# Memory.


@given(tensor=tensors(), view=st.sampled_from(list(VIEWS)), dtype=FLOATS, data=st.data())
def test_any_range_of_memory(
    tensor: Tensor, view: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    stored = VIEWS[view](tensor)
    reader = MemoryReader({"a": stored, "b": torch.ones(1)})
    span = data.draw(ranges(stored.numel()))
    require_range(reader, "a", stored, span)
    if stored.is_floating_point():
        require_cast(reader, "a", stored.detach(), span, dtype)
    require_equal(reader, {"a": stored, "b": torch.ones(1)})
    assert reader.bytes_read == 0
    reader.close()
    assert list(reader.names()) == []
    with pytest.raises(StageError, match="no tensor named a"):
        reader.read("a")


# Other dtypes.


@st.composite
def reachable(draw: Any, stored: torch.dtype) -> Tensor:
    """Return a tensor whose finite values `stored` can represent, perhaps rounded."""
    tensor: Tensor = draw(tensors())
    if torch.finfo(stored).max > 1e38 or not tensor.is_floating_point():
        return tensor
    small = random_bits(tensor.shape, torch.float8_e4m3fn, draw(st.integers(0, 2**32)))
    return (small.double() / 3).to(tensor.dtype)


@given(stored=FLOATS, read=FLOATS, data=st.data())
def test_any_range_of_a_cast(stored: torch.dtype, read: torch.dtype, data: st.DataObject) -> None:
    """Values are rounded to the declared dtype, whatever dtype they are read as."""
    tensor = data.draw(reachable(stored))
    reader = cast_reader(MemoryReader({"a": tensor}), lambda name: stored)
    expected = tensor.to(stored) if tensor.is_floating_point() else tensor
    assert reader.spec("a") == TensorSpec(tuple(tensor.shape), expected.dtype)
    span = data.draw(ranges(tensor.numel()))
    require_cast(reader, "a", expected, span, expected.dtype)
    require_cast(reader, "a", expected, span, read)
    if not tensor.is_floating_point():
        require_range(reader, "a", tensor, span)


@pytest.mark.parametrize("stored", [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_values_that_a_dtype_does_not_reach_are_refused(stored: torch.dtype) -> None:
    values = torch.tensor([1.0, float("inf"), float("nan"), 60.0])
    assert len(
        list(cast_reader(MemoryReader({"a": values}), lambda name: stored).chunks("a", 0, 4))
    )
    values = torch.tensor([1.0, 1e6])
    with pytest.raises(StageError, match="a has values beyond float"):
        cast_reader(MemoryReader({"a": values}), lambda name: stored).read("a")


def test_casts_are_by_name_and_leave_the_base_open() -> None:
    base = Counting({"a": torch.tensor([1 / 3]), "b": torch.tensor([1 / 3])})
    dtypes = {"a": torch.bfloat16, "b": torch.float64}
    reader = cast_reader(base, dtypes.__getitem__)
    require_equal(reader, {name: base.read(name).to(dtype) for name, dtype in dtypes.items()})
    assert reader.bytes_read == base.bytes_read == 16
    reader.close()
    assert not base.closed
    with pytest.raises(StageError, match="no tensor named c"):
        reader.spec("c")


# Rows from elsewhere.


@st.composite
def halves(draw: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """Draw a stored tensor, a fresh one of the final shape, and the number of elements that
    stay."""
    rows, more, width = (draw(st.integers(0, 6)) for _ in range(3))
    seed = draw(st.integers(0, 2**32))
    stored = random_bits((rows, width), dtype, seed)
    fresh = random_bits((more, width), torch.float32, seed + 1)
    return stored, fresh, min(rows, more) * width


def extended(stored: Tensor, fresh: Tensor, kept: int) -> ExtendedReader:
    spec = TensorSpec(tuple(fresh.shape), stored.dtype)
    readers = Counting({"source": stored}), Counting({"a": fresh})
    return ExtendedReader(*readers, {"a": Origin("source", kept, spec)})


@given(data=st.data())
def test_any_range_of_rows_from_two_readers(data: st.DataObject) -> None:
    dtype = data.draw(FLOATS)
    stored, fresh, kept = data.draw(halves(dtype))
    reader = extended(stored, fresh, kept)
    flat = torch.cat([stored.reshape(-1)[:kept], fresh.reshape(-1)[kept:].to(dtype)])
    assert reader.spec("a") == TensorSpec(tuple(fresh.shape), dtype)
    start, stop = data.draw(ranges(fresh.numel()))
    assert chunked(reader, "a", start, stop) == raw(flat[start:stop])
    old = max(min(stop, kept) - start, 0)
    assert reader.bytes_read == old * dtype.itemsize  # only the requested ones
    require_cast(reader, "a", flat.view(fresh.shape), (start, stop), dtype)
    assert reader.bytes_read == 2 * old * dtype.itemsize


def test_names_are_those_of_the_origins_and_all_readers_are_closed() -> None:
    base, fresh = Counting({"old": torch.ones(2)}), Counting({"new": torch.zeros(3)})
    spec = TensorSpec((2,), torch.float32)
    origins = {"x": Origin("old", 2, spec), "y": Origin("old", 2, spec),
               "new": Origin("new", 0, TensorSpec((3,), torch.float32))}  # fmt: skip
    reader = ExtendedReader(base, fresh, origins)
    require_equal(reader, {"x": torch.ones(2), "y": torch.ones(2), "new": torch.zeros(3)})
    with pytest.raises(StageError, match="no tensor named old"):
        reader.read("old")
    reader.close()
    assert base.closed
    assert fresh.closed
    base = Counting({"old": torch.arange(6.0)})
    reader = ExtendedReader(base, None, {"x": Origin("old", 4, spec._replace(shape=(2, 2)))})
    require_equal(reader, {"x": torch.arange(4.0).view(2, 2)})
    assert base.bytes_read == 4 * 4
    reader.close()
    assert base.closed


# Tensors of several readers, and computed ones.


def test_joined_tensors_are_those_of_the_first_reader_that_has_them() -> None:
    first, second = (
        Counting({"a": torch.ones(2)}),
        Counting({"a": torch.zeros(2), "b": torch.ones(1)}),
    )
    reader = JoinedReader(first, second)
    require_equal(reader, {"a": torch.ones(2), "b": torch.ones(1)})
    assert reader.bytes_read == first.bytes_read + second.bytes_read == 12
    for ask in (reader.spec, reader.read):
        with pytest.raises(StageError, match="no tensor named c"):
            ask("c")
    reader.close()
    assert first.closed
    assert second.closed


@given(data=st.data())
def test_any_range_of_computed_and_of_other_tensors(data: st.DataObject) -> None:
    base = Counting({"a": torch.arange(7.0), "b": torch.arange(3.0)})

    def doubled(name: str, start: int, stop: int) -> Iterator[Tensor]:
        for chunk in base.chunks("a", start, stop):
            yield chunk.double() * 2

    spec = TensorSpec((7,), torch.float64)
    reader = ComputedReader(base, {"2a": spec}, doubled, ["2a", "b"])
    expected = {"2a": torch.arange(7.0).double() * 2, "b": torch.arange(3.0)}
    require_equal(reader, expected)
    for name, tensor in expected.items():
        require_range(reader, name, tensor, data.draw(ranges(tensor.numel())))
    assert not reader.as_stored

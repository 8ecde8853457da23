"""Sizes, shards and headers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from pipeline.checkpoint.write_plan import CODES
from pipeline.contracts.model import TensorSpec
from stages.export.weight_files import data_size, head, shards

SPECS = st.lists(
    st.builds(
        lambda shape, dtype: (tuple(shape), dtype),
        st.lists(st.integers(0, 5), max_size=3),
        st.sampled_from(sorted(CODES, key=str)),
    ),
    min_size=1,
    max_size=12,
).map(
    lambda found: {
        f"t.{number}": TensorSpec(shape, dtype) for number, (shape, dtype) in enumerate(found)
    }
)


@given(specs=SPECS, limit=st.integers(1, 300))
def test_shards_keep_order_and_limit(specs: Mapping[str, TensorSpec], limit: int) -> None:
    parts = shards(specs, limit)
    order = sorted(specs, key=lambda name: -specs[name].dtype.itemsize)
    assert [name for part in parts.values() for name in part.tensors] == order
    sizes = [data_size(part) for part in parts.values()]
    both = zip(parts.values(), sizes, strict=True)
    assert all(size <= limit or len(part.tensors) == 1 or size == 0 for part, size in both)
    assert sum(sizes) == sum(spec.nbytes for spec in specs.values())


@given(specs=SPECS)
def test_header_is_what_safetensors_reads(specs: Mapping[str, TensorSpec]) -> None:
    ((_, part),) = shards(specs, 1 << 30).items()
    header = head(part)
    assert len(header) % 8 == 0
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    assert json.loads(header[8:])["__metadata__"] == {"format": "pt"}
    assert part.size == len(header) + data_size(part)
    tensors = load(header + bytes(data_size(part)))
    assert tensors.keys() == specs.keys()
    for name, spec in specs.items():
        assert tuple(tensors[name].shape) == spec.shape
        assert tensors[name].dtype == spec.dtype
        assert spec.nbytes == math.prod(spec.shape) * spec.dtype.itemsize
    assert not any(bool(tensor.to(torch.bool).any()) for tensor in tensors.values())

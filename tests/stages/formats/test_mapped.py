"""Ranges of tensors that were mapped from files."""

from __future__ import annotations

import struct

import pytest
import torch

from stages.formats.mapped import as_bytes, whole


def test_a_transposed_tensor_is_whole() -> None:
    (part,) = whole(torch.arange(6.0).view(2, 3).T).ranges
    assert part.tensor[part.start : part.stop].tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]


def test_one_element_of_a_wide_stride_is_bytes() -> None:
    (part,) = whole(torch.tensor([2.0, 3.0])[::2]).ranges
    assert bytes(as_bytes(part.tensor)) == struct.pack("<f", 2.0)


def test_a_tensor_of_more_elements_than_are_stored() -> None:
    with pytest.raises(ValueError, match="larger than what is stored"):
        whole(torch.zeros(1).expand(1 << 40))

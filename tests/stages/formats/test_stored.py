"""Tensors that are stored as chunks of files."""

from __future__ import annotations

import struct

import pytest
import torch

from stages.formats.stored import whole


def test_a_transposed_tensor_is_whole() -> None:
    ((_, data),) = whole(torch.arange(6.0).view(2, 3).T).read(0, 6)
    assert data.cast("f").tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]


def test_one_element_of_a_wide_stride_is_bytes() -> None:
    ((_, data),) = whole(torch.tensor([2.0, 3.0])[::2]).read(0, 1)
    assert bytes(data) == struct.pack("<f", 2.0)


def test_a_tensor_of_more_elements_than_are_stored() -> None:
    with pytest.raises(ValueError, match="larger than what is stored"):
        whole(torch.zeros(1).expand(1 << 40))

"""Pieces of weight files, by which two copies are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from pipeline.errors import StageError
from stages.weights.files import PIECES, sampled

SIZES = (0, 1, 3, 2_000, 4_096, 100_000)
"""Elements of tensors."""


def write(folder: Path, changed: int | None = None) -> Path:
    tensors = {f"t{n}": torch.arange(size, dtype=torch.float32) for n, size in enumerate(SIZES)}
    if changed is not None:
        tensors[f"t{changed}"] += 1
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


@given(number=st.integers(1, len(SIZES) - 1))
def test_a_changed_tensor_is_seen(tmp_path_factory: pytest.TempPathFactory, number: int) -> None:
    folder = tmp_path_factory.mktemp("weights")
    before = sampled([write(folder)])
    assert sampled([write(folder)]) == before
    assert sampled([write(folder, number)]) != before


def test_of_a_file_with_many_tensors_even_ones_are_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    found = []
    for changed in (-1, 0, 1):
        tensors = {f"{n:05}": torch.full((4096,), float(n == changed)) for n in range(2 * PIECES)}
        save_file(tensors, file)
        found.append(sampled([file]))
    assert found[0] != found[1]  # the first of each two
    assert found[0] == found[2]


@pytest.mark.parametrize("size", [0, 1, 5_000, 4096 * PIECES, 9_000_001])
def test_other_files_by_their_size_and_even_pieces(tmp_path: Path, size: int) -> None:
    file = tmp_path / "pytorch_model.bin"
    content = bytearray(range(256)) * (size // 256) + bytearray(size % 256)
    file.write_bytes(content)
    before = sampled([file])
    file.write_bytes(bytes(byte ^ 1 for byte in content))
    assert (sampled([file]) == before) == (size == 0)
    file.write_bytes(content + b"x")
    assert sampled([file]) != before


def test_names_and_order_count(tmp_path: Path) -> None:
    files = [tmp_path / "a.bin", tmp_path / "b.bin"]
    for file in files:
        file.write_bytes(b"same")
    assert sampled(files) != sampled(files[::-1])


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="No such file"):
        sampled([tmp_path / "gone.bin"])

"""Any range of any tensor of safetensors files, at the cost of its own bytes; damage is reported by
name."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from pipeline.errors import StageError
from stages.weights import files as weight_files
from stages.weights.files import SafetensorsReader
from tests.support.readers import (
    FLOATS,
    random_bits,
    ranges,
    require_cast,
    require_equal,
    require_range,
    tensors,
)

NAMES = st.sampled_from(["a", "a.weight", "b.0.weight", "ünïcode ✓", "", "A", "c" * 70])
CONTENTS = st.dictionaries(NAMES, tensors(), min_size=1)


def saved(folder: Path, contents: Mapping[str, Tensor], count: int = 1) -> list[Path]:
    """Write `count` files, with the tensors dealt out in turn."""
    files = [folder / f"{number}.safetensors" for number in range(count)]
    for number, file in enumerate(files):
        save_file(dict(list(contents.items())[number::count]), file)
    return files


def header(folder: Path, table: Any, data: bytes = b"0123") -> Path:
    """Write a file with this header, JSON or bytes."""
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    file = folder / "made.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes}


@given(contents=CONTENTS, count=st.integers(1, 3))
def test_every_tensor_of_several_files_is_there_bit_for_bit(
    folder: Path, contents: dict[str, Tensor], count: int
) -> None:
    reader = SafetensorsReader(saved(folder, contents, count))
    require_equal(reader, contents)
    assert reader.bytes_read == sum(tensor.nbytes for tensor in contents.values())
    reader.close()


@given(contents=CONTENTS, count=st.integers(1, 3), data=st.data())
def test_any_range_costs_its_own_bytes(
    folder: Path, contents: dict[str, Tensor], count: int, data: st.DataObject
) -> None:
    reader = SafetensorsReader(saved(folder, contents, count))
    expected = 0
    for name, tensor in contents.items():
        span = data.draw(ranges(tensor.numel()))
        require_range(reader, name, tensor, span)
        expected += 2 * (span[1] - span[0]) * tensor.element_size()  # by each of two methods
        assert reader.bytes_read == expected
    reader.close()


@given(tensor=tensors(FLOATS), dtype=FLOATS, data=st.data())
def test_any_range_in_another_dtype_costs_its_stored_bytes(
    folder: Path, tensor: Tensor, dtype: torch.dtype, data: st.DataObject
) -> None:
    reader = SafetensorsReader(saved(folder, {"a": tensor}))
    start, stop = data.draw(ranges(tensor.numel()))
    require_cast(reader, "a", tensor, (start, stop), dtype)
    assert reader.bytes_read == (stop - start) * tensor.element_size()
    reader.close()


def test_a_tensor_of_many_chunks_of_the_real_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(weight_files, "CHUNK", 1 << 22)
    tensor = random_bits((1237, 1777), torch.float32)
    reader = SafetensorsReader(saved(tmp_path, {"a": tensor}))
    require_range(reader, "a", tensor, (1, tensor.numel() - 1))
    reader.close()


def test_reading_leaves_no_file_open_and_goes_on_after_close(tmp_path: Path) -> None:
    reader = SafetensorsReader(saved(tmp_path, {"a": torch.arange(5)}))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        assert torch.equal(reader.read("a"), torch.arange(5))
        reader.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_metadata_is_no_tensor(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x", metadata={"format": "pt"})
    assert list(SafetensorsReader([tmp_path / "x"]).names()) == ["a"]


def test_unknown_name(tmp_path: Path) -> None:
    reader = SafetensorsReader(saved(tmp_path, {"a": torch.ones(2)}))
    for ask in (reader.spec, reader.read, lambda name: list(reader.chunks(name, 0, 1))):
        with pytest.raises(StageError, match="no tensor named b"):
            ask("b")


@given(data=st.data())
def test_a_file_cut_anywhere_is_refused_by_name(folder: Path, data: st.DataObject) -> None:
    file = saved(folder, {"a": torch.ones(3), "b": torch.ones(2, 2)})[0]
    whole = file.read_bytes()
    cut = folder / "cut.safetensors"
    cut.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(StageError, match=r"cut\.safetensors cannot be read as safetensors"):
        SafetensorsReader([cut])


DAMAGED: dict[str, Any] = {
    "offsets beyond the end": entry(shape=[2], data_offsets=[0, 8]),
    "offsets all beyond the end": entry(data_offsets=[400, 404]),
    "offsets backwards": entry(data_offsets=[4, 0]),
    "offsets negative": entry(data_offsets=[-4, 0]),
    "offsets that are three": entry(data_offsets=[0, 4, 8]),
    "offsets of another size": entry(data_offsets=[0, 3]),
    "offsets infinite": b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1e999]}}',
    "offsets no numbers": entry(data_offsets=["x", "y"]),
    "wrong dtype": entry(dtype="F64"),
    "unknown dtype": entry(dtype="Q4"),
    "dtype that is a list": entry(dtype=["F32"]),
    "dtype that is missing": {"a": {"shape": [1], "data_offsets": [0, 4]}},
    "negative shape": entry(shape=[-1]),
    "two negative sides": entry(shape=[-1, -1]),
    "fractional shape": entry(shape=[1.0]),
    "shape that is a text": entry(shape="1"),
    "shape that is a number": entry(shape=1),
    "entry that is no mapping": {"a": 3},
    "table that is a list": [],
    "garbage": b"{]",
    "no text": b"\xff\xfe\x00",
    "nothing": b"",
    "nesting without end": b"[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_header_is_refused_by_the_file_s_name(damage: str, tmp_path: Path) -> None:
    file = header(tmp_path, DAMAGED[damage])
    with pytest.raises(StageError, match=f"^{file} cannot be read as safetensors: "):
        SafetensorsReader([file])


def refusal(file: Path) -> str | None:
    try:
        SafetensorsReader([file]).close()
    except StageError as error:
        return str(error)
    return None


@given(text=st.binary(max_size=60), length=st.integers(0, 80))
def test_garbage_never_is_more_than_an_error(folder: Path, text: bytes, length: int) -> None:
    file = folder / "garbage"
    file.write_bytes(struct.pack("<Q", length) + text)
    said = refusal(file)
    assert said is None or said.startswith(f"{file} cannot be read as safetensors: ")


def test_a_header_longer_than_its_file(tmp_path: Path) -> None:
    file = tmp_path / "long"
    file.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(
        StageError, match="long cannot be read as safetensors: its header is incomplete"
    ):
        SafetensorsReader([file])


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="absent cannot be read as safetensors"):
        SafetensorsReader([tmp_path / "absent"])


def test_one_name_in_two_files(tmp_path: Path) -> None:
    for file in ("one", "two"):
        save_file({"a": torch.ones(2)}, tmp_path / file)
    with pytest.raises(StageError, match=f"^a is in {tmp_path}/one and in {tmp_path}/two$"):
        SafetensorsReader([tmp_path / "one", tmp_path / "two"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_file_that_shrinks_after_it_was_opened(dtype: torch.dtype, tmp_path: Path) -> None:
    file = saved(tmp_path, {"a": torch.ones(100)})[0]
    reader = SafetensorsReader([file])
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 4)
    assert torch.equal(filled_with(reader, 99, dtype), torch.ones(99, dtype=dtype))
    with pytest.raises(StageError, match=f"^{file}: has become shorter while it was read"):
        filled_with(reader, 100, dtype)
    reader.close()


def filled_with(reader: SafetensorsReader, count: int, dtype: torch.dtype) -> Tensor:
    out = torch.zeros(count, dtype=dtype)
    reader.read_into("a", 0, out)
    return out


def test_a_file_that_goes_after_it_was_opened(tmp_path: Path) -> None:
    file = saved(tmp_path, {"a": torch.ones(3)})[0]
    reader = SafetensorsReader([file])
    file.unlink()
    with pytest.raises(StageError, match=f"^{file}: cannot be read: No such file"):
        reader.read("a")

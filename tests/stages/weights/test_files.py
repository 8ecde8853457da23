"""Any range of any tensor of safetensors files and of files of `torch.save`, at the cost of its own
bytes; damage is reported by name, and no code is run; pieces by which two copies are told apart."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from pipeline.checkpoint.write_plan import CODES
from pipeline.errors import StageError
from stages.weights import files as product
from stages.weights.files import PIECES, SafetensorsReader, TorchFilesReader, sampled
from tests.support.model_folders import opened
from tests.support.models import FAMILIES, filled, random_source
from tests.support.readers import (
    DTYPES,
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

# safetensors.


def stored(folder: Path, contents: Mapping[str, Tensor], count: int = 1) -> list[Path]:
    """Write `count` files, with the tensors dealt out in turn."""
    files = [folder / f"{number}.safetensors" for number in range(count)]
    for number, file in enumerate(files):
        save_file(dict(list(contents.items())[number::count]), file)
    return files


def header(folder: Path, table: Any, data: bytes = b"0123") -> Path:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    file = folder / "made.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes}


@given(contents=CONTENTS, count=st.integers(1, 3), data=st.data())
def test_any_range_of_several_files_costs_its_own_bytes(
    folder: Path, contents: dict[str, Tensor], count: int, data: st.DataObject
) -> None:
    reader = SafetensorsReader(stored(folder, contents, count))
    require_equal(reader, contents)
    expected = sum(tensor.nbytes for tensor in contents.values())
    assert reader.bytes_read == expected
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
    reader = SafetensorsReader(stored(folder, {"a": tensor}))
    start, stop = data.draw(ranges(tensor.numel()))
    require_cast(reader, "a", tensor, (start, stop), dtype)
    assert reader.bytes_read == (stop - start) * tensor.element_size()
    reader.close()


def test_a_tensor_of_many_chunks_of_the_real_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product, "CHUNK", 1 << 22)
    tensor = random_bits((1237, 1777), torch.float32)
    reader = SafetensorsReader(stored(tmp_path, {"a": tensor}))
    require_range(reader, "a", tensor, (1, tensor.numel() - 1))
    reader.close()


def test_reading_leaves_no_file_open_and_goes_on_after_close(tmp_path: Path) -> None:
    save_file({"a": torch.arange(5)}, tmp_path / "x", metadata={"format": "pt"})
    reader = SafetensorsReader([tmp_path / "x"])
    assert list(reader.names()) == ["a"]  # metadata is no tensor
    for _ in range(3):
        assert torch.equal(reader.read("a"), torch.arange(5))
        reader.close()
    opened = [one.resolve() for one in Path("/proc/self/fd").iterdir()]
    assert tmp_path / "x" not in opened
    for ask in (reader.spec, reader.read, lambda name: list(reader.chunks(name, 0, 1))):
        with pytest.raises(StageError, match="no tensor named b"):
            ask("b")


@given(data=st.data())
def test_a_file_cut_anywhere_is_refused_by_name(folder: Path, data: st.DataObject) -> None:
    whole = stored(folder, {"a": torch.ones(3), "b": torch.ones(2, 2)})[0].read_bytes()
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


@given(text=st.binary(max_size=60), length=st.integers(0, 80))
def test_garbage_never_is_more_than_an_error(folder: Path, text: bytes, length: int) -> None:
    file = folder / "garbage"
    file.write_bytes(struct.pack("<Q", length) + text)
    said = f"{file} cannot be read as safetensors: "
    try:
        SafetensorsReader([file]).close()
    except StageError as error:
        said = str(error)
    assert said.startswith(f"{file} cannot be read as safetensors: ")


def test_a_header_longer_than_its_file_a_file_that_is_missing_and_a_name_in_two(
    tmp_path: Path,
) -> None:
    (tmp_path / "long").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(StageError, match=r"long cannot be read as .*: its header is incomplete"):
        SafetensorsReader([tmp_path / "long"])
    with pytest.raises(StageError, match="absent cannot be read as safetensors"):
        SafetensorsReader([tmp_path / "absent"])
    for file in ("one", "two"):
        save_file({"a": torch.ones(2)}, tmp_path / file)
    with pytest.raises(StageError, match=f"^a is in {tmp_path}/one and in {tmp_path}/two$"):
        SafetensorsReader([tmp_path / "one", tmp_path / "two"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_file_that_shrinks_and_goes_after_it_was_opened(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    file = stored(tmp_path, {"a": torch.ones(100)})[0]
    reader = SafetensorsReader([file])
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 4)
    out = torch.zeros(100, dtype=dtype)
    reader.read_into("a", 0, out[:99])
    assert torch.equal(out[:99], torch.ones(99, dtype=dtype))
    with pytest.raises(StageError, match=f"^{file}: has become shorter while it was read"):
        reader.read_into("a", 0, out)
    reader.close()
    file.unlink()
    with pytest.raises(StageError, match=f"^{file}: cannot be read: No such file"):
        reader.read("a")


# Files of `torch.save`.

ARCHIVE = pytest.mark.parametrize("archive", [True, False], ids=["zip", "legacy"])
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda t: t,
    "transposed": lambda t: t.movedim(0, -1) if t.ndim else t,
    "every other": lambda t: t[::2] if t.ndim else t,
    "a slice": lambda t: t[1:] if t.ndim else t,
    "narrowed": lambda t: t[..., :2] if t.ndim else t,
    "a parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
}


def saved(file: Path, content: Any, *, archive: bool = True) -> Path:
    torch.save(content, file, _use_new_zipfile_serialization=archive)
    return file


OLD_DTYPES = [dtype for dtype in CODES if "float8" not in str(dtype)]
"""Dtypes that torch stores without an archive."""


@ARCHIVE
@given(view=st.sampled_from(list(VIEWS)), data=st.data())
def test_any_range_of_any_view_costs_its_own_bytes(
    folder: Path, archive: bool, view: str, data: st.DataObject
) -> None:
    tensor = VIEWS[view](data.draw(tensors(DTYPES if archive else st.sampled_from(OLD_DTYPES))))
    reader = TorchFilesReader([saved(folder / "x", {"a": tensor}, archive=archive)])
    start, stop = data.draw(ranges(tensor.numel()))
    require_range(reader, "a", tensor, (start, stop))
    assert reader.bytes_read == 2 * (stop - start) * tensor.element_size()
    require_equal(reader, {"a": tensor})
    reader.close()


@given(tensor=tensors(FLOATS), dtype=FLOATS, data=st.data())
def test_any_range_of_a_torch_file_in_another_dtype(
    folder: Path, tensor: Tensor, dtype: torch.dtype, data: st.DataObject
) -> None:
    reader = TorchFilesReader([saved(folder / "x", {"a": tensor})])
    require_cast(reader, "a", tensor, data.draw(ranges(tensor.numel())), dtype)
    reader.close()


@ARCHIVE
def test_tensors_that_share_memory_and_are_changed_after_they_were_read(
    archive: bool, tmp_path: Path
) -> None:
    base = torch.arange(24.0).view(4, 6)
    content = {"base": base, "row": base[2], "column": base[:, 3], "again": base, "t": base.t()}
    file = saved(tmp_path / "x", content, archive=archive)
    before = file.read_bytes()
    reader = TorchFilesReader([file])
    require_equal(reader, content)
    for name, tensor in content.items():
        require_range(reader, name, tensor, (1, tensor.numel() - 1))
    reader.read("base").zero_()
    assert torch.equal(reader.read("base"), base)
    assert file.read_bytes() == before


@pytest.mark.parametrize("family", ["llama", "llama_tied", "mixtral"])
def test_a_folder_of_sharded_files(family: str, tmp_path: Path) -> None:
    """As older tools wrote them."""
    model = filled(random_source(FAMILIES[family], tmp_path))
    state, weight_map = list(model.state_dict().items()), {}
    for number in range(3):
        name = f"pytorch_model-{number + 1:05}-of-00003.bin"
        part = OrderedDict(state[number::3])
        saved(tmp_path / name, part, archive=bool(number % 2))
        weight_map.update(dict.fromkeys(part, name))
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    model.config.save_pretrained(tmp_path)
    reader = opened(tmp_path).weights()
    require_equal(reader, model.state_dict())
    reader.close()


class Trap:
    """Creates a folder when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.file),))


@ARCHIVE
@pytest.mark.parametrize("place", ["among tensors", "instead", "metadata"])
def test_code_is_refused_and_never_run(archive: bool, place: str, tmp_path: Path) -> None:
    trap = Trap(tmp_path / "sprung")
    contents = {
        "among tensors": {"a": torch.ones(2), "b": trap},
        "instead": trap,
        "metadata": {"a": torch.ones(2), "_metadata": trap},
    }
    file = saved(tmp_path / "x", contents[place], archive=archive)
    with pytest.raises(StageError, match=f"^{file}: refused: .*could run code"):
        TorchFilesReader([file])
    assert not trap.file.exists()
    torch.load(file, weights_only=False)
    assert trap.file.exists()  # so it does run code


def test_a_bare_pickle_with_code_is_refused_and_never_run(tmp_path: Path) -> None:
    trap = Trap(tmp_path / "sprung")
    file = tmp_path / "x"
    file.write_bytes(pickle.dumps({"a": trap}))
    with pytest.raises(StageError, match=f"^{file}: "):
        TorchFilesReader([file])
    assert not trap.file.exists()


NO_TENSORS: Mapping[str, tuple[Any, str]] = {
    "list": ([torch.ones(1)], "holds no state dict"),
    "tensor": (torch.ones(1), "holds no state dict"),
    "nested": ({"model": {"a": torch.ones(1)}}, "'model' is not a tensor"),
    "number": ({"a": torch.ones(1), "step": 3}, "'step' is not a tensor"),
    "name that is none": ({1: torch.ones(1)}, "1 is not a tensor"),
    "expanded": ({"a": torch.ones(1).expand(1 << 40)}, "larger than what is stored of it"),
    "sparse": ({"a": torch.eye(3).to_sparse()}, "a: sparse, quantized or without values"),
    "meta": ({"a": torch.empty(3, device="meta")}, "a: sparse, quantized or without values"),
}


@ARCHIVE
@pytest.mark.parametrize("case", NO_TENSORS)
def test_more_than_plain_tensors(archive: bool, case: str, tmp_path: Path) -> None:
    content, said = NO_TENSORS[case]
    file = saved(tmp_path / "x", content, archive=archive)
    with pytest.raises(StageError, match=f"^{file}: .*{said}"):
        TorchFilesReader([file])


def test_module_metadata_is_no_tensor(tmp_path: Path) -> None:
    state = torch.nn.Linear(2, 3).state_dict()
    assert state._metadata  # type: ignore[attr-defined]
    content = {**state, "_metadata": dict(state._metadata)}  # type: ignore[attr-defined]
    for given_content in (state, content):
        reader = TorchFilesReader([saved(tmp_path / "x", given_content)])
        require_equal(reader, state)


@ARCHIVE
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_cut_torch_file_is_refused_by_name(archive: bool, share: float, tmp_path: Path) -> None:
    file = saved(tmp_path / "x", {"a": torch.ones(1000)}, archive=archive)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(StageError, match=f"^{file}: "):
        TorchFilesReader([file])


def test_a_missing_torch_file_and_a_name_in_two(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"absent: cannot be read: .*No such file"):
        TorchFilesReader([tmp_path / "absent"])
    files = [saved(tmp_path / name, {"a": torch.ones(2)}) for name in ("one", "two")]
    with pytest.raises(StageError, match=f"^{files[1]}: holds a, which another file holds too$"):
        TorchFilesReader(files)


# Pieces of weight files.

SIZES = (0, 1, 3, 2_000, 4_096, 100_000)
"""Elements of tensors."""


def write(folder: Path, changed: int | None = None) -> Path:
    made = {f"t{n}": torch.arange(size, dtype=torch.float32) for n, size in enumerate(SIZES)}
    if changed is not None:
        made[f"t{changed}"] += 1
    save_file(made, folder / "model.safetensors")
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
        made = {f"{n:05}": torch.full((4096,), float(n == changed)) for n in range(2 * PIECES)}
        save_file(made, file)
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


def test_names_and_order_of_files_count(tmp_path: Path) -> None:
    files = [tmp_path / "a.bin", tmp_path / "b.bin"]
    for file in files:
        file.write_bytes(b"same")
    assert sampled(files) != sampled(files[::-1])
    with pytest.raises(StageError, match="No such file"):
        sampled([tmp_path / "gone.bin"])

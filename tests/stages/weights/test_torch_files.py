"""Files of `torch.save`: any range of any tensor, also of tensors that share memory; no code is
run."""

from __future__ import annotations

import json
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeline.checkpoint.write_plan import CODES
from pipeline.errors import StageError
from stages.weights.files import TorchFilesReader
from tests.support.models import FAMILIES, context, filled, random_source
from tests.support.readers import (
    DTYPES,
    FLOATS,
    ranges,
    require_cast,
    require_equal,
    require_range,
    tensors,
)

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
    stored = VIEWS[view](data.draw(tensors(DTYPES if archive else st.sampled_from(OLD_DTYPES))))
    reader = TorchFilesReader([saved(folder / "x", {"a": stored}, archive=archive)])
    start, stop = data.draw(ranges(stored.numel()))
    require_range(reader, "a", stored, (start, stop))
    assert reader.bytes_read == 2 * (stop - start) * stored.element_size()
    require_equal(reader, {"a": stored})
    reader.close()


@given(tensor=tensors(FLOATS), dtype=FLOATS, data=st.data())
def test_any_range_in_another_dtype(
    folder: Path, tensor: Tensor, dtype: torch.dtype, data: st.DataObject
) -> None:
    reader = TorchFilesReader([saved(folder / "x", {"a": tensor})])
    require_cast(reader, "a", tensor, data.draw(ranges(tensor.numel())), dtype)
    reader.close()


@ARCHIVE
def test_tensors_that_share_memory(archive: bool, tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    content = {"base": base, "row": base[2], "column": base[:, 3], "again": base, "t": base.t()}
    reader = TorchFilesReader([saved(tmp_path / "x", content, archive=archive)])
    require_equal(reader, content)
    for name, tensor in content.items():
        require_range(reader, name, tensor, (1, tensor.numel() - 1))


@ARCHIVE
def test_what_is_read_may_be_changed(archive: bool, tmp_path: Path) -> None:
    file = saved(tmp_path / "x", {"a": torch.arange(5.0)}, archive=archive)
    before = file.read_bytes()
    reader = TorchFilesReader([file])
    reader.read("a").zero_()
    assert torch.equal(reader.read("a"), torch.arange(5.0))
    assert file.read_bytes() == before


def sharded(folder: Path, model: Any, count: int) -> None:
    """Write `pytorch_model-....bin` with its index, as older tools did."""
    state = list(model.state_dict().items())
    weight_map = {}
    for number in range(count):
        name = f"pytorch_model-{number + 1:05}-of-{count:05}.bin"
        part = OrderedDict(state[number::count])
        saved(folder / name, part, archive=bool(number % 2))
        weight_map.update(dict.fromkeys(part, name))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    model.config.save_pretrained(folder)


@pytest.mark.parametrize("family", ["llama", "llama_tied", "mixtral"])
def test_a_folder_of_sharded_files(family: str, tmp_path: Path) -> None:
    from stages.model.hf import HfModel

    model = filled(random_source(FAMILIES[family], tmp_path))
    sharded(tmp_path, model, 3)
    reader = HfModel(path=str(tmp_path)).run(context(tmp_path)).weights()
    require_equal(reader, model.state_dict())
    reader.close()


def test_one_name_in_two_files(tmp_path: Path) -> None:
    files = [saved(tmp_path / name, {"a": torch.ones(2)}) for name in ("one", "two")]
    with pytest.raises(StageError, match=f"^{files[1]}: holds a, which another file holds too$"):
        TorchFilesReader(files)


class Trap:
    """Creates a folder when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.file),))


@ARCHIVE
@pytest.mark.parametrize("place", ["beside", "instead", "metadata"])
def test_code_is_refused_and_never_run(archive: bool, place: str, tmp_path: Path) -> None:
    trap = Trap(tmp_path / "sprung")
    contents = {
        "beside": {"a": torch.ones(2), "b": trap},
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
def test_a_cut_file_is_refused_by_name(archive: bool, share: float, tmp_path: Path) -> None:
    file = saved(tmp_path / "x", {"a": torch.ones(1000)}, archive=archive)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(StageError, match=f"^{file}: "):
        TorchFilesReader([file])


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"absent: cannot be read: .*No such file"):
        TorchFilesReader([tmp_path / "absent"])

"""Tensors that are stored as chunks. A pickle that would run a command, in place of each of torch's
files that are read, is refused by name and never run."""

from __future__ import annotations

import io
import pickle
import struct
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from pipeline.checkpoint.formats import Reading, StateFormat
from pipeline.errors import CheckpointError
from stages.formats.formats import Dcp, DeepSpeed
from stages.formats.stored import whole
from tests.support.damage import Bomb
from tests.support.formats import tiny_native, tiny_universal

REFUSED = r"refused: it holds posix\.system, and reading that could run code"


@pytest.fixture
def bomb(tmp_path: Path) -> Bomb:
    return Bomb(tmp_path / "it-ran")


def read(form: StateFormat, folder: Path) -> None:
    """Open and read everything."""
    source = form.open(folder, Reading())
    for key, entry in source.tensors.items():
        for _ in source.read(key, 0, entry.numel):
            pass


NATIVE = ["zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"]
UNIVERSAL = [
    "mp_rank_00_model_states.pt", "zero/optimizer_state.pt", "zero/w/fp32.pt",
    "zero/w/exp_avg.pt", "zero/w/exp_avg_sq.pt", "zero/w/step.pt",
]  # fmt: skip
FILES = [(tiny_native, name) for name in NATIVE] + [(tiny_universal, name) for name in UNIVERSAL]


@pytest.mark.parametrize(("make", "name"), FILES, ids=lambda one: getattr(one, "__name__", one))
def test_deepspeed(make: Callable[[Path], None], name: str, tmp_path: Path, bomb: Bomb) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    make(folder)
    if make is tiny_universal:
        read(DeepSpeed(), folder)
    assert (folder / name).is_file()
    torch.save({"module": bomb, "param": bomb}, folder / name)
    with pytest.raises(CheckpointError, match=f"{Path(name).name}: {REFUSED}"):
        read(DeepSpeed(), folder)
    assert not bomb.mark.exists()


def test_every_part_of_dcp(tmp_path: Path, bomb: Bomb) -> None:
    flat = {
        "state.w.exp_avg": torch.ones(4), "state.w.exp_avg_sq": torch.ones(4),
        "state.w.step": torch.tensor(3.0), "param_groups.w.lr": 1e-3,
        "param_groups.w.betas": (0.9, 0.99),
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_dcp({"model": {"w": torch.ones(4)}, "optimizer": flat}, checkpoint_id=tmp_path,
                 no_dist=True)  # fmt: skip
    read(Dcp(), tmp_path)
    metadata = FileSystemReader(tmp_path).read_metadata()
    assert len(metadata.storage_data) == 6
    planted = io.BytesIO()
    torch.save(bomb, planted)
    for index, stored in metadata.storage_data.items():
        file = tmp_path / stored.relative_path
        place = file.stat().st_size
        with file.open("ab") as stream:
            stream.write(planted.getvalue())
        elsewhere = replace(stored, offset=place, length=planted.tell())
        changed = replace(metadata, storage_data={**metadata.storage_data, index: elsewhere})
        (tmp_path / ".metadata").write_bytes(pickle.dumps(changed))
        with pytest.raises(CheckpointError, match=rf"__0_0\.distcp \(.*\): {REFUSED}"):
            read(Dcp(), tmp_path)
    assert not bomb.mark.exists()


def test_a_transposed_tensor_is_whole() -> None:
    ((_, data),) = whole(torch.arange(6.0).view(2, 3).T).read(0, 6)
    assert data.cast("f").tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]


def test_one_element_of_a_wide_stride_is_bytes() -> None:
    ((_, data),) = whole(torch.tensor([2.0, 3.0])[::2]).read(0, 1)
    assert bytes(data) == struct.pack("<f", 2.0)


def test_a_tensor_of_more_elements_than_are_stored() -> None:
    with pytest.raises(ValueError, match="larger than what is stored"):
        whole(torch.zeros(1).expand(1 << 40))

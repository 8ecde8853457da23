"""torch.distributed.checkpoint: the live state is read from every layout, and written back."""

from __future__ import annotations

import io
import itertools
import pickle
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import save

from pipeline.checkpoint.formats import Reading, StateSource
from pipeline.checkpoint.manifest import TensorEntry
from pipeline.contracts.engine import EngineState
from pipeline.errors import CheckpointError
from stages.formats.dcp_compat import read_metadata, require_cover
from stages.formats.formats import Canonical, Dcp
from stages.formats.stored import Box, Stored, group
from tests.support.damage import Bomb
from tests.support.formats import digest_of, load_dcp, same, save_dcp
from tests.support.processes import run_ranks
from tests.support.state import Setting

STEP = "step-00000003"


def opened(folder: Path, **reading: Any) -> StateSource:
    form = Dcp()
    assert form.detect(folder)
    return form.open(folder, Reading(**reading))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Return checkpoints of FSDP2 on three ranks in several layouts, and the live state."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(save_dcp, 3, str(folder), Setting(wrap="fsdp full"))[0]


@pytest.mark.parametrize("layout", ["flat", "root", "nested"])
def test_the_live_state_comes_out(layout: str, saved: tuple[Path, dict[str, str]]) -> None:
    folder, live = saved
    source = opened(folder / layout, samples=5)
    assert digest_of(source) == same(live)
    assert (source.step, source.world_size, source.progress["samples"]) == (3, 3, 5)
    groups = [(g.settings["lr"], g.settings["weight_decay"]) for g in source.state.groups]
    assert groups == [(1e-3, 0.1), (1e-3, 0.0)]
    assert [len(group.parameters) for group in source.state.groups] == [15, 5]


def test_columns_on_every_rank_make_rows(saved: tuple[Path, dict[str, str]]) -> None:
    source = opened(saved[0] / "columns", weights_only=True)
    parts = [(first, bytes(data)) for first, data in source.read("weight/w", 3, 31)]
    assert parts[0][0] == 3
    data = b"".join(data for _, data in parts)
    assert data == torch.arange(3.0, 31.0).numpy().tobytes()


def test_other_strategies_load_what_was_written(
    saved: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    folder, live = saved
    Canonical().write(opened(folder / "flat"), tmp_path / STEP)
    Dcp().write(Canonical().open(tmp_path / STEP, Reading()), tmp_path / "dcp")
    assert digest_of(opened(tmp_path / "dcp")) == same(live)
    for loaded in run_ranks(load_dcp, 2, str(tmp_path), ["fsdp full", "ddp"])[0]:
        assert loaded == live


def test_weights_alone_keep_the_step_and_the_ties(saved: tuple[Path, dict[str, str]]) -> None:
    source = opened(saved[0] / "flat", weights_only=True)
    assert source.step == 3
    assert source.state.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    with pytest.raises(CheckpointError, match=r"holds no optimizer state .*--weights-only"):
        opened(saved[0] / "nested" / "pytorch_model_fsdp_0")


def test_weights_of_a_training_whose_optimizer_is_another(tmp_path: Path) -> None:
    state = {
        "model": {"a": torch.ones(3, 4), "b": torch.zeros(5)},
        "optimizer": {"state.a.momentum_buffer": torch.ones(3, 4), "state.b.factor": "text"},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, checkpoint_id=tmp_path, no_dist=True)
    source = opened(tmp_path, weights_only=True)
    assert sorted(source.tensors) == ["weight/a", "weight/b"]
    assert (source.step, source.state.kinds(), source.state.groups) == (0, [], [])
    with pytest.raises(CheckpointError, match="the optimizer kept momentum_buffer for a"):
        opened(tmp_path)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_metadata_that_would_run_code_is_refused_by_name(protocol: int, tmp_path: Path) -> None:
    bomb = Bomb(tmp_path / "it-ran")
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"state": bomb}, protocol))
    with pytest.raises(CheckpointError, match=r"\.metadata: refused: it holds posix\.system"):
        opened(tmp_path)
    assert not bomb.mark.exists()


@pytest.mark.parametrize("name", [
    "torch.load", "torch.hub.load", "builtins.eval", "torch.distributed.checkpoint.metadata.os",
    "torch.distributed.checkpoint.filesystem.FileSystem", "torch.Size.__class__",
])  # fmt: skip
def test_only_the_classes_of_metadata_are_admitted(name: str, tmp_path: Path) -> None:
    module, _, attribute = name.rpartition(".")
    (tmp_path / ".metadata").write_bytes(b"c%b\n%b\n." % (module.encode(), attribute.encode()))
    with pytest.raises(CheckpointError, match=f"refused: it holds {name}"):
        read_metadata(tmp_path)


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps({"a": 1}), pickle.dumps(7)[:-1]])
def test_metadata_that_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata: (cannot be read|is no metadata)"):
        opened(tmp_path)


def read_all(source: StateSource) -> None:
    for key, entry in source.tensors.items():
        for _ in source.read(key, 0, entry.numel):
            pass


def test_damaged_files(saved: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    file = shutil.copytree(saved[0] / "flat", tmp_path / "d") / "__1_0.distcp"
    whole = file.read_bytes()
    for place in (len(whole) // 3, len(whole) // 2, len(whole) - 900):
        wrong = bytearray(whole)
        wrong[place] ^= 4
        file.write_bytes(wrong)
        try:
            read_all(opened(tmp_path / "d"))
        except CheckpointError as error:
            assert "__1_0.distcp" in str(error)  # noqa: PT017 - what is not noticed is below
        else:
            # only padding, and names of members that no reader uses
            assert digest_of(opened(tmp_path / "d")) == same(saved[1])
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp .*"):
        read_all(opened(tmp_path / "d"))
    file.unlink()
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp .*No such file"):
        read_all(opened(tmp_path / "d"))


def cut(shape: tuple[int, ...], edges: list[list[int]]) -> list[Box]:
    """Return the boxes of a grid."""
    axes = [
        list(itertools.pairwise(sorted({0, size, *(e for e in own if e < size)})))
        for size, own in zip(shape, edges, strict=True)
    ]
    return [
        Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
        for cell in itertools.product(*axes)
    ]


def stored_as(whole: Tensor, boxes: list[Box]) -> Stored:
    def load(number: int) -> Tensor:
        box = boxes[number]
        part = whole[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].contiguous()
        return part.view(-1).view(torch.uint8).view(*part.shape, whole.element_size())

    shape = tuple(whole.shape)
    return Stored(shape=shape, dtype=whole.dtype, grid=shape, boxes=boxes, load=load)


@given(st.data())
def test_any_range_of_any_grid(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    edges = [data.draw(st.lists(st.integers(0, 6), max_size=2)) for _ in shape]
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    found = io.BytesIO()
    for first, part in stored_as(whole, cut(shape, edges)).read(start, stop):
        assert first == start + found.tell() // 2
        found.write(part)
    assert found.getvalue() == whole.view(-1)[start:stop].numpy().tobytes()


@pytest.mark.parametrize(("boxes", "message"), [
    ([Box((0, 0), (2, 3))], "do not cover the entire tensor"),
    ([Box((0, 0), (3, 3)), Box((2, 0), (2, 3))], "does not match tensor volume"),
    ([Box((0, 0), (3, 3)), Box((2, 0), (1, 3))], "overlap"),
    ([Box((0, 0), (5, 3))], "exceeds tensor dim"),
    ([Box((-1, 0), (4, 3))], "should be >=0"),
    ([Box((0,), (4,))], "shards rank is 1"),
    ([], "holds no chunk"),
])  # fmt: skip
def test_boxes_that_are_no_tensor(boxes: list[Box], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        require_cover(boxes, (4, 3))


def test_no_memory_is_taken_for_what_is_only_claimed(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({"model": {"w": torch.ones(1, 4)}}, checkpoint_id=tmp_path, no_dist=True)
    metadata = FileSystemReader(tmp_path).read_metadata()
    stored: Any = metadata.state_dict_metadata["model.w"]
    stored.size = stored.chunks[0].sizes = torch.Size((1, 6_000_000_000))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    source = opened(tmp_path, weights_only=True)
    with pytest.raises(CheckpointError, match="a chunk has 16 bytes instead of 24000000000"):
        next(source.read("weight/w", 0, 6_000_000_000))


class Claimed(StateSource):
    """A state with a manifest of any content."""

    where, step, world_size, writer, progress = "there", 3, 1, {}, {}

    def __init__(self, names: list[str], **state: Any) -> None:
        self.tensors = {
            f"weight/{name}": TensorEntry(key=f"weight/{name}", dtype="F32", shape=(2,))
            for name in names
        }
        nothing = {"aliases": {}, "frozen": [], "groups": [], "updates": {}}
        self.state = EngineState(**nothing | {"loss_scale": None} | state)

    def read(self, key: str, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        yield start, memoryview(bytes(4 * (stop - start)))

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    "name", ["", "/", "../../x", "a b", "\n", "\0", "é", "a" * 5000, ".metadata"]
)
def test_odd_names_come_out_as_they_were(name: str, tmp_path: Path) -> None:
    Dcp().write(Claimed([name, "b"]), tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".metadata", "__0_0.distcp"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert set(opened(tmp_path / "out", weights_only=True).tensors) == {
        f"weight/{name}",
        "weight/b",
    }


@pytest.mark.parametrize(
    "claims",
    [
        {"aliases": {"c": "none"}},
        {"groups": [group({}, ["none"])], "updates": {"none": 1}},
        {"groups": [group({}, ["a"])], "updates": {"a": 10**30}},
    ],
)
def test_what_a_manifest_claims_in_vain(claims: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^there: "):
        Dcp().write(Claimed(["a"], **claims), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []

"""Formats are found by name and by the content of a folder, and mistakes have clear messages."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pipeline.chain.registry import Entry
from pipeline.checkpoint.file_layout import FULL, SHARDED, FileLayout
from pipeline.checkpoint.formats import (
    Formats,
    Reading,
    StateFormat,
    StateSource,
    StateView,
    appearing,
    step_target,
    write_checkpoint,
)
from pipeline.checkpoint.manifest import TensorEntry
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.checkpoint.store import LocalStore
from pipeline.contracts.engine import EngineState, ParameterGroup
from pipeline.errors import CheckpointError, PluginError, UsageError


class One(StateFormat):
    name = "one"

    def detect(self, folder: Path) -> bool:
        return (folder / "one").exists()

    def open(self, folder: Path, reading: Reading) -> StateSource:
        raise NotImplementedError


class Both(One):
    name = "both"

    def write(self, source: StateSource, folder: Path) -> Sequence[str]:
        return ()


def entry(name: str, attribute: str, distribution: str = "d") -> Entry:
    value = f"{__name__}:{attribute}"
    return Entry(name=name, value=value, distribution=distribution, version="1")


@pytest.fixture
def formats() -> Formats:
    return Formats([entry("one", "One"), entry("both", "Both"), entry("one", "One")])


def test_by_name(formats: Formats) -> None:
    assert formats.names() == ["both", "one"]
    assert formats.get("one").name == "one"
    with pytest.raises(UsageError, match=r"no format `on` \(there are both, one\)"):
        formats.get("on")


def test_by_folder(formats: Formats, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        formats.detect(tmp_path / "nothing")
    with pytest.raises(UsageError, match="no checkpoint of a known format"):
        formats.detect(tmp_path)
    (tmp_path / "one").touch()
    with pytest.raises(UsageError, match=r"could be both, one \(say which with --from\)"):
        formats.detect(tmp_path)


def test_faulty_packages() -> None:
    with pytest.raises(PluginError, match="`one` is registered by d 1 and e 1"):
        Formats([entry("one", "One"), entry("one", "One", "e")]).get("one")
    with pytest.raises(PluginError, match="cannot be loaded: AttributeError"):
        Formats([entry("one", "Nothing")]).get("one")
    with pytest.raises(PluginError, match="is not a StateFormat"):
        Formats([entry("one", "Path")]).get("one")


def test_what_is_installed_here() -> None:
    formats = Formats.installed()
    own = {"canonical", "full", "deepspeed", "dcp", "trainer"}
    assert own <= set(formats.names())


STEP = "step-00000020"
SHAPES = {
    "weight/a": ("F32", (40_000, 3)), "weight/b": ("BF16", (5, 7)), "weight/scalar": ("F32", ()),
    "weight/none": ("F32", (0, 4)), "exp_avg/a": ("F32", (40_000, 3)),
    "random/00000/torch": ("U8", (5056,)),
}  # fmt: skip


class Made(StateSource):
    """Bytes that follow from the key, given in pieces of odd sizes."""

    where = "made"
    step = 20
    world_size = 4
    writer = {"format": "made"}
    progress = {"step": 20, "samples": 320}
    state = EngineState(
        aliases={"head": "a"}, frozen=["b"],
        groups=[ParameterGroup(settings={"lr": 0.1}, parameters=["a"], moments=["exp_avg"])],
        updates={"a": 20}, loss_scale=None,
    )  # fmt: skip

    def __init__(self, shapes: dict[str, tuple[str, tuple[int, ...]]] = SHAPES) -> None:
        self.tensors = {
            key: TensorEntry(key=key, dtype=dtype, shape=shape)
            for key, (dtype, shape) in shapes.items()
        }
        self.missing = 0

    def read(self, key: str, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        size = self.tensors[key].itemsize
        for first in range(start, stop - self.missing, 100_003):
            last = min(first + 100_003, stop - self.missing)
            yield first, memoryview(content(key, first * size, last * size))

    def close(self) -> None:
        pass


def content(key: str, start: int, stop: int) -> bytes:
    seed = hashlib.sha256(key.encode()).digest()
    turn = start % len(seed)
    return ((seed[turn:] + seed[:turn]) * ((stop - start) // len(seed) + 1))[: stop - start]


@pytest.mark.parametrize("arrangement", [SHARDED, FULL], ids=lambda one: one.name)
def test_everything_is_written(arrangement: FileLayout, tmp_path: Path) -> None:
    source = Made()
    write_checkpoint(source, LocalStore(tmp_path), STEP, arrangement)
    reader = CheckpointReader(LocalStore(tmp_path), STEP)
    reader.verify()
    assert set(reader.tensors) == set(SHAPES) - {"weight/none"}
    for key, entry in reader.tensors.items():
        assert reader.read_bytes(key) == content(key, 0, entry.numel * entry.itemsize), key
    assert (reader.step, reader.world_size, reader.state) == (20, 4, source.state)
    assert (reader.progress, reader.writer) == (source.progress, source.writer)
    assert LocalStore(tmp_path).names() == [STEP]


@pytest.mark.parametrize("arrangement", [SHARDED, FULL], ids=lambda one: one.name)
def test_a_failure_leaves_nothing(arrangement: FileLayout, tmp_path: Path) -> None:
    source = Made()
    source.missing = 1
    with pytest.raises(CheckpointError, match="is incomplete"):
        write_checkpoint(source, LocalStore(tmp_path), STEP, arrangement)
    assert list(tmp_path.iterdir()) == []


def test_memory_does_not_grow_with_a_tensor(tmp_path: Path) -> None:
    peaks = []
    for elements in (1 << 22, 1 << 24):
        source = Made({"weight/a": ("F32", (elements,))})
        tracemalloc.start()
        write_checkpoint(source, LocalStore(tmp_path / str(elements)), STEP, SHARDED)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # 64 MiB pass through; only the checksums of 16 KiB blocks grow.
    assert peaks[1] < 10 << 20
    assert peaks[1] - peaks[0] < 1 << 20


def test_views() -> None:
    counts: list[int] = []
    view = StateView(StateView(Made(), counts.append), weights_only=True)
    assert set(view.tensors) == {key for key in SHAPES if key.startswith("weight/")}
    assert (view.state.updates, view.state.kinds(), view.state.frozen) == ({}, [], ["a", "b"])
    assert view.state.aliases == {"head": "a"}
    assert b"".join(data for _, data in view.read("weight/b", 0, 35)) == content("weight/b", 0, 70)
    assert sum(counts) == 70


def test_a_folder_is_called_after_its_step(tmp_path: Path) -> None:
    assert step_target(tmp_path, 20) == tmp_path / STEP
    assert step_target(tmp_path / STEP, 20) == tmp_path / STEP
    with pytest.raises(UsageError, match="the state is of step 20"):
        step_target(tmp_path / "step-00000021", 20)


def test_a_folder_appears_at_the_end_or_not_at_all(tmp_path: Path) -> None:
    with appearing(tmp_path / "new" / "x") as folder:
        (folder / "a").mkdir()
        (folder / "a" / "f").write_text("1")
        assert not (tmp_path / "new" / "x").exists()
    assert (tmp_path / "new" / "x" / "a" / "f").read_text() == "1"
    with pytest.raises(KeyboardInterrupt), appearing(tmp_path / "y") as folder:  # noqa: PT012
        (folder / "f").write_text("1")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["new"]

"""Any part of any tensor is read as it was written, however it was divided, and every kind of
damage is noticed and reported."""

from __future__ import annotations

import dataclasses
import itertools
import random
import shutil
import tempfile
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from pipeline.checkpoint import file_layout, reader, write_plan
from pipeline.checkpoint.division import Division, Piece, Tile, require_cover
from pipeline.checkpoint.file_layout import FULL, SHARDED, FileLayout
from pipeline.checkpoint.manifest import BLOCK, MANIFEST, Damaged, DataFile, TensorEntry
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.checkpoint.restore import Restoration
from pipeline.checkpoint.store import LocalStore
from pipeline.contracts.engine import WEIGHT, Fragment
from pipeline.errors import CheckpointError
from tests.support.cuts import KEY, NAME, Cut, content, cuts, elements, fragments, write
from tests.support.tier import examples, times
from tests.support.tiny_store import ARRANGEMENTS, Tiny, content_of, digests, read_digests
from tests.support.tiny_store import write as write_tiny

FLIPS = times(quick=200, full=2000)
FORMS = st.sampled_from([SHARDED, FULL])
each_form = pytest.mark.parametrize("form", [SHARDED, FULL], ids=lambda form: form.name)


@st.composite
def journeys(draw: st.DrawFn) -> tuple[Cut, Cut]:
    """Draw two cuts of one tensor, of up to some blocks of checksums."""
    before = draw(cuts())
    wider = *before.shape[:-1], before.shape[-1] * draw(st.sampled_from([1, 1, 30, 1000]))
    before = dataclasses.replace(before, shape=wider)
    return before, draw(cuts(wider))


@given(journeys(), FORMS, st.booleans(), st.data())
@examples(30)
def test_whatever_was_written_is_read(
    journey: tuple[Cut, Cut], form: FileLayout, passes: bool, data: st.DataObject
) -> None:
    before, after = journey
    flat = content(before)
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_plan, "WORTH_A_CUT", data.draw(st.sampled_from([1, 100, 1 << 18])))
        write(Path(root), before, form, passage=3 * BLOCK if passes else None)
        patch.setattr(file_layout, "CHUNK", BLOCK * data.draw(st.integers(1, 3)))
        patch.setattr(reader, "LONG", data.draw(st.sampled_from([1, 100, 1 << 20])))
        opened = CheckpointReader(LocalStore(root), NAME)
        good: list[int] = []
        opened.verify(good.append)
        assert sum(good) == flat.numel() * 4
        edges = st.tuples(*[st.integers(0, before.numel)] * 2)
        for low, high in ((0, before.numel), *data.draw(st.lists(edges.map(sorted), max_size=4))):
            found = [(first, bytes(part)) for first, part in opened.read(KEY, low, high)]
            assert [first for first, _ in found] == list(
                itertools.accumulate((len(part) // 4 for _, part in found), initial=low)
            )[:-1]
            assert b"".join(part for _, part in found) == flat[low:high].numpy().tobytes()
        for rank in range(after.ranks):
            for fragment in fragments(after, rank, flat):
                live = torch.full_like(fragment.state[WEIGHT], -1)
                fill(opened, fragment, live)
                assert torch.equal(live, fragment.state[WEIGHT])
        opened.close()


def fill(opened: CheckpointReader, fragment: Fragment, live: torch.Tensor) -> None:
    """Restore a tensor as a rank does."""
    nothing: Any = SimpleNamespace(accept=())
    Restoration(nothing, nothing, nothing)._fill(opened, fragment, WEIGHT, live)


@given(cuts(), st.data())
def test_pieces_are_found_by_their_elements(cut: Cut, data: st.DataObject) -> None:
    tiles = [(rank, tile) for rank in range(cut.ranks) for tile in cut.tiles(rank)]
    files = [
        DataFile(name=f"{rank}", size=8 + 4 * len(cut.elements(rank)), data_start=8, header=0)
        for rank in range(cut.ranks)
    ]
    manifest: Any = SimpleNamespace(
        tensors=[TensorEntry(key=KEY, dtype="F32", shape=cut.shape)], files=files, version=4,
        parts=[SimpleNamespace(pieces=()) for _ in files],
        divided=Division.of([[Piece(rank, *tile) for rank, tile in tiles]]),
    )  # fmt: skip
    low = data.draw(st.integers(0, cut.numel))
    wanted = Tile(low, data.draw(st.integers(low, cut.numel)))
    hits = [(r, t) for r, t in tiles if set(elements(t)) & set(range(*wanted[:2]))]
    _, found = reader.Places(manifest, "here").find(KEY, wanted)
    assert sorted((one.rank, one.tile) for one in found) == sorted(hits)
    assert all(one.file == one.rank for one in found)


@each_form
def test_a_rank_reads_its_own_columns_only(form: FileLayout, tmp_path: Path) -> None:
    cut = Cut((256, 1024), 1, 2, 4, 0, 1)
    write(tmp_path, cut, form)
    for rank in range(cut.ranks):
        opened = CheckpointReader(LocalStore(tmp_path), NAME)
        (fragment,) = fragments(cut, rank, content(cut))
        fill(opened, fragment, fragment.state[WEIGHT])
        assert opened.bytes_read == 256 * 1024 * 4 // cut.ranks


@pytest.mark.parametrize("rows", [2, 64])
def test_memory_does_not_grow_with_rows(rows: int, tmp_path: Path) -> None:
    """Rows are of 16 MiB, and of 1 MiB."""
    cut = Cut((rows, (1 << 23) // rows), 1, 1, 2, None, 1)
    write(tmp_path, cut, SHARDED)
    opened = CheckpointReader(LocalStore(tmp_path), NAME)
    tracemalloc.start()
    count = sum(len(data) for _, data in opened.read(KEY, 0, cut.numel))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 4 << 23
    assert peak < file_layout.CHUNK + (1 << 20)
    assert opened.bytes_read < 1.1 * count


def test_names_in_files(tmp_path: Path) -> None:
    cut = Cut((6, 8), 1, 2, 2, 0, 1)
    write(tmp_path, cut, SHARDED)
    found = {}
    for file in sorted((tmp_path / NAME).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    whole = content(cut).view(6, 8)
    wanted = {
        f"weight/a@{row * 8 + column}x4/8": whole[row : row + 3, column : column + 4]
        for row in (0, 3)
        for column in (0, 4)
    }
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[list[TensorEntry], list[list[Piece]]]:
    """Draw tensors of any dtype, cut into any ranges that either of two ranks writes."""
    tensors, pieces = list[TensorEntry](), list[list[Piece]]()
    for number in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from(["F64", "F32", "BF16", "U8"]))
        length = draw(st.integers(1, 3 * BLOCK))
        tensors.append(TensorEntry(key=f"weight/{number}", dtype=dtype, shape=(length,)))
        cuts = draw(st.sets(st.integers(1, max(1, length - 1)), max_size=4))
        edges = itertools.pairwise(sorted({0, *cuts, length}))
        pieces.append([Piece(draw(st.integers(0, 1)), *edge) for edge in edges])
    return tensors, pieces


@given(ranges(), st.data())
@examples(60)
def test_any_range(case: tuple[list[TensorEntry], list[list[Piece]]], data: st.DataObject) -> None:
    tensors, pieces = case
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_layout, "CHUNK", BLOCK * data.draw(st.integers(1, 3)))
        assert write_tiny(Tiny(root, "sharded", tensors=tensors, pieces=pieces), 1).problem == ""
        opened = CheckpointReader(LocalStore(root), NAME)
        for _ in range(6):
            tensor = data.draw(st.sampled_from(tensors))
            start = data.draw(st.integers(0, tensor.numel))
            stop = data.draw(st.integers(start, tensor.numel))
            before, size = opened.bytes_read, tensor.itemsize
            found = [(first, bytes(part)) for first, part in opened.read(tensor.key, start, stop)]
            tiles = [Tile(at - start, at - start + len(part) // size) for at, part in found]
            assert tiles == sorted(tiles)
            require_cover(tiles, stop - start)
            expected = content_of(tensor, 1)[start * size : stop * size]
            assert b"".join(part for _, part in found) == expected
            blocks = 2 * sum(map(len, pieces))
            assert opened.bytes_read - before <= len(expected) + blocks * BLOCK
            memory = bytearray(len(expected))
            opened.read_into(tensor.key, start, memoryview(memory))
            assert memory == expected
        opened.verify()


@pytest.fixture(scope="module", params=ARRANGEMENTS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a root with a good checkpoint."""
    root = tmp_path_factory.mktemp(request.param.replace(" ", "-"))
    assert write_tiny(Tiny(str(root), request.param), 1).problem == ""
    return root


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    """Return a copy to damage."""
    return Path(shutil.copytree(written, tmp_path / "root"))


def read_all(root: Path, *, whole: bool = True) -> None:
    """Verify everything, or only read each tensor."""
    if whole:
        read_digests(LocalStore(root), NAME)
        return
    opened = CheckpointReader(LocalStore(root), NAME)
    for key, tensor in opened.tensors.items():
        opened.read_into(key, 0, memoryview(bytearray(tensor.nbytes)))


def files_of(root: Path) -> list[Path]:
    return sorted((root / NAME).iterdir())


def regions(root: Path) -> list[tuple[Path, int, int, str]]:
    """Return file, first byte, end, and the tensor whose data is there, if any."""
    opened = CheckpointReader(LocalStore(root), NAME)
    manifest, folder = opened.manifest, root / NAME
    sums = [folder / part.sums for part in manifest.parts]
    found = [(path, 0, path.stat().st_size, "") for path in (folder / MANIFEST, *sums)]
    found += [(folder / file.name, 0, file.data_start, "") for file in manifest.files]
    for tensor in manifest.tensors:
        for placed in opened.places.find(tensor.key, Tile(0, tensor.numel))[1]:
            path = folder / manifest.files[placed.file].name
            for begin, low, high in placed.place.segments(0, placed.place.numel):
                found.append((path, begin, begin + high - low, tensor.key))
    sizes = {
        file: sum(end - start for f, start, end, _ in found if f == file) for file in files_of(root)
    }
    assert sizes == {file: file.stat().st_size for file in files_of(root)}  # together: every byte
    return found


def test_no_flipped_byte_is_read_silently(root: Path) -> None:
    chance = random.Random(0)
    places = regions(root)
    chance.shuffle(places)
    for turn in range(FLIPS // 2):
        file, start, end, key = places[turn % len(places)]
        data = bytearray(file.read_bytes())
        place, bits = chance.randrange(start, end), chance.randrange(1, 256)
        data[place] ^= bits
        file.write_bytes(data)
        with pytest.raises(Damaged) as told:
            read_all(root, whole=turn % 3 == 0)
        assert str(file) in str(told.value), (file, place)
        assert key in str(told.value), (file, place)
        data[place] ^= bits
        file.write_bytes(data)
    assert read_digests(LocalStore(root), NAME) == digests(1)


def test_missing_truncated_and_extended_files(root: Path) -> None:
    for file in files_of(root):
        data = file.read_bytes()
        for broken in (None, b"", data[:-1], data[: len(data) // 2], data + b"\0", data + data):
            if broken is None:
                file.unlink()
            else:
                file.write_bytes(broken)
            for whole in (True, False):
                with pytest.raises(Damaged, match=str(file)):
                    read_all(root, whole=whole)
            file.write_bytes(data)
    read_all(root)


def test_any_two_files_swapped(root: Path) -> None:
    for first, second in itertools.combinations(files_of(root), 2):
        one, other = first.read_bytes(), second.read_bytes()
        first.write_bytes(other)
        second.write_bytes(one)
        with pytest.raises(Damaged, match=f"{first}|{second}"):
            read_all(root)
        first.write_bytes(one)
        second.write_bytes(other)


def test_files_of_another_step(root: Path, request: pytest.FixtureRequest) -> None:
    """Files are replaced alone and together with their checksums."""
    other = root.parent / "other"
    write_tiny(Tiny(str(other), request.node.callspec.params["written"]), 2)
    foreign = {path.name: path.read_bytes() for path in (other / "step-00000002").iterdir()}
    files = [file for file in files_of(root) if file.name != MANIFEST]
    for names in [{file.name} for file in files] + [
        {"rank-00001.sums", file.name} for file in files
    ]:
        kept = {name: (root / NAME / name).read_bytes() for name in names}
        for name in names:
            (root / NAME / name).write_bytes(foreign[name])
        with pytest.raises(Damaged, match=str(root / NAME / "(rank|model|optimizer|random)")):
            read_all(root)
        for name, data in kept.items():
            (root / NAME / name).write_bytes(data)


def test_a_file_that_nobody_named_changes_nothing(root: Path) -> None:
    """The file is never opened."""
    shutil.copy(next((root / NAME).glob("*.safetensors")), root / NAME / "rank-00002.safetensors")
    assert read_digests(LocalStore(root), NAME) == digests(1)


@pytest.mark.parametrize("written", ARRANGEMENTS[:1], indirect=True)
def test_what_is_not_the_checkpoint(root: Path, tmp_path: Path) -> None:
    opened = CheckpointReader(LocalStore(root), NAME)
    for start, stop in ((0, 151), (-1, 3), (5, 4)):
        with pytest.raises(CheckpointError, match="weight/a has 150 elements"):
            list(opened.read("weight/a", start, stop))
    with pytest.raises(CheckpointError, match="holds no weight/z"):
        list(opened.read("weight/z", 0, 0))
    (root / NAME).rename(root / "step-00000007")
    with pytest.raises(Damaged, match=r"step-00000007.*of step 1, in a folder that was renamed"):
        CheckpointReader(LocalStore(root), "step-00000007")
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "weights.bin").touch()
    with pytest.raises(CheckpointError, match=r"no checkpoint: it holds no manifest\.json") as told:
        CheckpointReader(LocalStore(tmp_path), NAME)
    assert not isinstance(told.value, Damaged)


@pytest.mark.parametrize("written", ARRANGEMENTS[:2], indirect=True)
def test_a_file_that_is_a_link_elsewhere_is_not_read(root: Path) -> None:
    """It may be any file of this person's; a checkpoint whose folder is a link is read."""
    elsewhere = root.parent / "elsewhere"
    shutil.copytree(root / NAME, elsewhere)
    for file in files_of(root):
        file.unlink()
        file.symlink_to(elsewhere / file.name)
        with pytest.raises(CheckpointError, match="leads out of") as told:
            read_all(root)
        assert str(file) in str(told.value)
        assert not isinstance(told.value, Damaged)
        file.unlink()
        shutil.copy(elsewhere / file.name, file)
    shutil.rmtree(root / NAME)
    (root / NAME).symlink_to(elsewhere)
    assert read_digests(LocalStore(root), NAME) == digests(1)

"""Every kind of damage to a checkpoint is noticed at reading, and reported."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.local_store import LocalStore
from pipeline.checkpoint.manifest import MANIFEST, Damaged
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.checkpoint.tiles import Tile
from pipeline.errors import CheckpointError
from tests.support.tier import times
from tests.support.tiny_store import ARRANGEMENTS, Tiny, digests, read_digests, write

FLIPS = times(quick=200, full=2000)
Change = Callable[[dict[str, Any]], None]
NAME = "step-00000001"
FLAT = ARRANGEMENTS[:2]


@pytest.fixture(scope="module", params=ARRANGEMENTS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a root with a good checkpoint."""
    root = tmp_path_factory.mktemp(request.param.replace(" ", "-"))
    assert write(Tiny(str(root), request.param), 1).problem == ""
    return root


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    """Return a copy to damage."""
    return Path(shutil.copytree(written, tmp_path / "root"))


def read_all(root: Path, *, whole: bool) -> None:
    """Verify everything, or only read each tensor."""
    if whole:
        read_digests(LocalStore(root), NAME)
        return
    reader = CheckpointReader(LocalStore(root), NAME)
    try:
        for key, tensor in reader.tensors.items():
            reader.read_into(key, 0, memoryview(bytearray(tensor.numel * tensor.itemsize)))
    finally:
        reader.close()


def regions(root: Path) -> list[tuple[Path, int, int, str]]:
    """Yield file, first byte, end, and the tensor whose data is there, if any."""
    reader = CheckpointReader(LocalStore(root), NAME)
    manifest, folder = reader.manifest, root / NAME
    found = [(folder / MANIFEST, 0, (folder / MANIFEST).stat().st_size, "")]
    for file in manifest.files:
        found.append((folder / file.name, 0, file.data_start, ""))
    for part in manifest.parts:
        found.append((folder / part.sums, 0, (folder / part.sums).stat().st_size, ""))
    for tensor in manifest.tensors:
        for place in reader._places.find(tensor.key, Tile(0, tensor.numel)):
            path = folder / manifest.files[place.file].name
            for begin, low, high in place.extent.segments(0, place.tile.numel * tensor.itemsize):
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
    for turn in range(FLIPS // len(FLAT)):
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


def files_of(root: Path) -> list[Path]:
    return sorted((root / NAME).iterdir())


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
    read_all(root, whole=True)


def test_any_two_files_swapped(root: Path) -> None:
    files = files_of(root)
    for first in files:
        for second in files[: files.index(first)]:
            one, other = first.read_bytes(), second.read_bytes()
            first.write_bytes(other)
            second.write_bytes(one)
            with pytest.raises(Damaged, match=f"{first}|{second}"):
                read_all(root, whole=True)
            first.write_bytes(one)
            second.write_bytes(other)


def test_files_of_another_step(root: Path) -> None:
    """Files are replaced alone and together with their checksums."""
    other = root.parent / "other"
    form = "full" if (root / NAME / "model.safetensors").exists() else "sharded"
    is_columns = CheckpointReader(LocalStore(root), NAME).manifest.version == 3
    write(Tiny(str(other), form + " columns" * is_columns), 2)
    foreign = {path.name: path.read_bytes() for path in (other / "step-00000002").iterdir()}
    files = [file for file in files_of(root) if file.name != MANIFEST]
    for names in [{file.name} for file in files] + [
        {"rank-00001.sums", file.name} for file in files
    ]:
        kept = {name: (root / NAME / name).read_bytes() for name in names}
        for name in names:
            (root / NAME / name).write_bytes(foreign[name])
        with pytest.raises(Damaged, match=str(root / NAME / "(rank|model|optimizer|random)")):
            read_all(root, whole=True)
        for name, data in kept.items():
            (root / NAME / name).write_bytes(data)


def test_a_checkpoint_under_the_name_of_another_step(root: Path) -> None:
    (root / NAME).rename(root / "step-00000007")
    with pytest.raises(Damaged, match=r"step-00000007.*of step 1, in a folder that was renamed"):
        CheckpointReader(LocalStore(root), "step-00000007")


def test_a_file_that_nobody_named_changes_nothing(root: Path) -> None:
    """The file is never opened."""
    shutil.copy(next((root / NAME).glob("*.safetensors")), root / NAME / "rank-00002.safetensors")
    assert read_digests(LocalStore(root), NAME) == digests(1)


def test_a_folder_of_another_format_is_not_called_damaged(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "weights.bin").touch()
    with pytest.raises(CheckpointError, match=r"no checkpoint: it holds no manifest\.json") as told:
        CheckpointReader(LocalStore(tmp_path), NAME)
    assert not isinstance(told.value, Damaged)


def edit(root: Path, change: Change, *, sign: bool = True) -> None:
    """Change the manifest and correct its checksum."""
    path = root / NAME / MANIFEST
    data = json.loads(path.read_bytes())
    change(data["checkpoint"])
    body = json.dumps(data["checkpoint"])
    digest = hashlib.sha256(body.encode()).hexdigest() if sign else data["sha256"]
    path.write_text(f'{{"checkpoint": {body}, "sha256": "{digest}"}}\n')


def change_run(key: str, field: int, value: int) -> Change:
    """Change the first run of a tensor: start, stop, length, rank, step, cuts, apart."""

    def change(manifest: dict[str, Any]) -> None:
        runs_of(manifest, key)[0][field] = value

    return change


def runs_of(manifest: dict[str, Any], key: str) -> list[Any]:
    number = [tensor["key"] for tensor in manifest["tensors"]].index(key)
    runs: list[Any] = manifest["runs"][number]
    return runs


def change_tensor(field: str, value: Any, number: int = 0) -> Change:
    return lambda manifest: manifest["tensors"][number].update({field: value})


def change_file(field: str, value: Any) -> Change:
    return lambda manifest: manifest["files"][0].update({field: value})


def forget_tensor(manifest: dict[str, Any]) -> None:
    """Remove the last tensor; the rest stays consistent."""
    number = len(manifest["tensors"]) - 1
    del manifest["tensors"][number], manifest["runs"][number]


def repeat_tensor(manifest: dict[str, Any]) -> None:
    manifest["tensors"].append(dict(manifest["tensors"][0]))
    manifest["runs"].append(manifest["runs"][0])


def swap_sums(manifest: dict[str, Any]) -> None:
    first, second = manifest["parts"]
    first["sums"], second["sums"] = second["sums"], first["sums"]


EDITS: dict[str, tuple[Change, str]] = {
    "smaller shape": (change_tensor("shape", [3, 49]), "weight/a: ends at element 150 of 147"),
    "larger shape": (change_tensor("shape", [3, 51]), "weight/a: ends at element 150 of 153"),
    "unknown dtype": (change_tensor("dtype", "F33"), "weight/a has the unknown dtype F33"),
    "tensor forgotten": (forget_tensor, "do not fill it"),
    "tensor twice": (repeat_tensor, "two entries for weight/a"),
    "run dropped": (lambda m: runs_of(m, "weight/b").pop(), "weight/b: ends at element 4501"),
    "run twice": (
        lambda m: runs_of(m, "weight/b").append(runs_of(m, "weight/b")[0]),
        "weight/b: elements .* are there twice",
    ),
    "run shorter": (
        change_run("weight/b", 1, 4500),
        "weight/b: elements 4500 to 4501 are missing|weight/b: divided among ranks",
    ),
    "run longer than all": (change_run("weight/b", 2, 10**30), "weight/b: divided among ranks"),
    "run of nothing": (change_run("weight/b", 2, 0), "written by another version: runs"),
    "run of another rank": (change_run("weight/b", 3, 1), r"do not fill it|rank-0000[01]\.sums"),
    "run of no rank": (
        change_run("weight/b", 3, 2),
        "weight/b: divided among ranks that do not exist",
    ),
    "run of many ranks": (change_run("weight/b", 2, 1), "weight/b: divided among ranks"),
    "run cut": (change_run("weight/b", 5, 2), "weight/b: divided among ranks"),
    "no runs": (lambda m: m.update(runs=[]), "does not say which rank has which tensor"),
    "tensor in no file": (change_tensor("file", 9), "weight/a: lies in an unknown file"),
    "tensor in another file": (change_tensor("file", 1), "do not fill it"),
    "file larger": (change_file("size", 10**15), "do not fill it|instead of 1000000000000000"),
    "header larger": (change_file("data_start", 10**15), "longer than the file"),
    "another header": (change_file("header", 1), "its header is damaged"),
    "sums swapped": (swap_sums, "rank-0000[01].sums"),
    "another step": (lambda m: m.update(step=2), "of step 2, in a folder that was renamed"),
    "another version": (lambda m: m.update(version=4), "written by another version: version"),
    "more fields": (lambda m: m.update(more=2), "written by another version: more"),
}
for bad in ("/etc/passwd", "../x", "a/../../x", "a/..", ".", "", "a//b", "a\\b", "a\0b", ".hidden"):
    EDITS[f"file {bad!r}"] = (change_file("name", bad), "names a file outside of its folder")
    EDITS[f"sums {bad!r}"] = (
        lambda manifest, bad=bad: manifest["parts"][0].update(sums=bad),  # type: ignore[misc]
        "names a file outside of its folder",
    )


@pytest.mark.parametrize("written", FLAT, indirect=True)
@pytest.mark.parametrize("name", EDITS)
def test_an_edited_manifest(root: Path, name: str) -> None:
    change, problem = EDITS[name]
    edit(root, change)
    for whole in (True, False):
        with pytest.raises(CheckpointError, match=problem) as told:
            read_all(root, whole=whole)
        assert str(root / NAME) in str(told.value)


COLUMN_EDITS: dict[str, tuple[Change, str]] = {
    "wider rows": (
        change_run("weight/b", 7, 101), "9000 elements do not make whole rows of the length"
    ),
    "other rows": (change_run("weight/b", 7, 90), "weight/b: is divided by columns of other rows"),
    "no rows": (change_run("weight/b", 7, 0), "weight/b: divided among ranks that do not exist"),
    "negative rows": (change_run("weight/b", 7, -100), "written by another version: runs"),
    "no bands": (change_run("weight/b", 8, 0), "written by another version: runs"),
    "fewer bands": (change_run("weight/b", 8, 1), "weight/b: divided among ranks"),
    "more bands": (change_run("weight/b", 8, 3), "weight/b: divided among ranks"),
    "bands on one rank": (change_run("weight/b", 9, 0), "weight/b: divided among ranks"),
    "bands further apart": (change_run("weight/b", 9, 2), "weight/b: divided among ranks"),
    "parts of half rows": (change_run("weight/b", 2, 4550), "weight/b: divided among ranks"),
    "more ranks": (change_run("weight/b", 2, 4500), "weight/b: divided among ranks"),
    "columns missing": (change_run("exp_avg/b", 1, 3929), "exp_avg/b: element 29 is missing"),
    "columns twice": (change_run("exp_avg/b", 1, 3931), "exp_avg/b: element 30 is there twice"),
    "a row missing": (change_run("exp_avg/b", 1, 3830), "exp_avg/b: element 3900 is missing"),
    "a row twice": (change_run("exp_avg/b", 1, 4030), "exp_avg/b: element 4000 is there twice"),
    "a column on the left": (change_run("exp_avg/b", 0, 1), "exp_avg/b: element 0 is missing"),
    "no columns": (change_run("exp_avg/b", 0, 50), "exp_avg/b: has a part without columns"),
    "other rows beside": (
        change_run("exp_avg/b", 7, 50), "is divided by columns of rows of different lengths"
    ),
    "a longer field list": (lambda m: runs_of(m, "weight/b")[0].append(0), "another version: runs"),
    "a version without columns": (lambda m: m.update(version=2), "its version does not have"),
}  # fmt: skip


@pytest.mark.parametrize("written", ARRANGEMENTS[2:], indirect=True)
@pytest.mark.parametrize("name", COLUMN_EDITS)
def test_edited_columns(root: Path, name: str) -> None:
    change, problem = COLUMN_EDITS[name]
    edit(root, change)
    for whole in (True, False):
        with pytest.raises(CheckpointError, match=problem):
            read_all(root, whole=whole)


@pytest.mark.parametrize("written", ARRANGEMENTS[2:], indirect=True)
def test_no_number_of_a_rule_leads_elsewhere(root: Path) -> None:
    """A changed rule is refused, unless it says the same: a range is one in rows of any length."""
    chance, refused = random.Random(0), 0
    good = (root / NAME / MANIFEST).read_bytes()
    turns = times(quick=60, full=3000)
    for _ in range(turns):
        key, field = chance.choice(("weight/b", "exp_avg/b")), chance.randrange(10)
        value = chance.choice([0, 1, 2, 3, 29, 30, 50, 99, 100, 101, 200, 4500, 9000, 10**30])
        number = chance.randrange(len(runs_of(json.loads(good)["checkpoint"], key)))
        (root / NAME / MANIFEST).write_bytes(good)
        edit(root, change_number(key, number, field, value))
        try:
            assert read_digests(LocalStore(root), NAME) == digests(1), (key, number, field, value)
        except CheckpointError:
            refused += 1
    assert refused > turns * 0.8


def change_number(key: str, number: int, field: int, value: int) -> Change:
    """Change a number of a run, which may have been left out."""

    def change(manifest: dict[str, Any]) -> None:
        run = runs_of(manifest, key)[number]
        run += [0, 1, 0][len(run) - 7 :]
        run[field] = value

    return change


def test_an_edited_manifest_with_the_old_checksum(root: Path) -> None:
    edit(root, lambda manifest: manifest.update(step=2), sign=False)
    with pytest.raises(Damaged, match=f"{root / NAME / MANIFEST}: its checksum is wrong"):
        read_all(root, whole=True)


def test_an_edit_that_changes_nothing_is_accepted(root: Path) -> None:
    """The edits above are refused for their change, not for being edits."""
    edit(root, lambda manifest: None)
    assert read_digests(LocalStore(root), NAME) == digests(1)


def test_what_is_asked_for_beyond_a_tensor(root: Path) -> None:
    reader = CheckpointReader(LocalStore(root), NAME)
    for start, stop in ((0, 151), (-1, 3), (5, 4)):
        with pytest.raises(CheckpointError, match="weight/a has 150 elements"):
            list(reader.read("weight/a", start, stop))
    with pytest.raises(CheckpointError, match="holds no weight/z"):
        list(reader.read("weight/z", 0, 0))


@pytest.mark.parametrize("written", FLAT, indirect=True)
def test_a_file_that_is_a_link_elsewhere_is_not_read(root: Path) -> None:
    """It may be any file of this person's; a checkpoint whose folder is a link is read."""
    elsewhere = root.parent / "elsewhere"
    shutil.copytree(root / NAME, elsewhere)
    for file in files_of(root):
        file.unlink()
        file.symlink_to(elsewhere / file.name)
        with pytest.raises(CheckpointError, match="leads out of") as told:
            read_all(root, whole=True)
        assert str(file) in str(told.value)
        assert not isinstance(told.value, Damaged)
        file.unlink()
        shutil.copy(elsewhere / file.name, file)
    shutil.rmtree(root / NAME)
    (root / NAME).symlink_to(elsewhere)
    assert read_digests(LocalStore(root), NAME) == digests(1)

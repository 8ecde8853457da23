"""Checkpoints of earlier releases can be read. Manifests of version 1 list every piece; version 2
divides tensors by rules, but not by columns."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.local_store import LocalStore
from pipeline.checkpoint.manifest import MANIFEST, Damaged, Manifest
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.errors import CheckpointError
from tests.pipeline.checkpoint.test_damage import NAME, edit, runs_of
from tests.support.tiny_store import read_digests

SAME = {
    "weight/b": "67c990332226eb416e0f15c7737c0f079fc3f8fca800373e84303dee3316a03d",
    "exp_avg/b": "2709c675cbb3d4d4207e1d6ba3ec0b08f7fdde9b9087d4e9d597ef84e2dff14b",
}
DIGESTS = {
    1: SAME | {
        "weight/a": "adbf4e88c53c1ff1ecc151345f6fb4299ac39ef7193c589d742a20870f942b8a",
        "random/00000/torch": "c5dcc7b20486c22960ed7fa328535a604e955fa8ef07a468345a8d7b764f68ae",
        "random/00001/torch": "d7d60b57d1283a8354e5027033e40cd595852182ea5e852c454bd09f9a76ceed",
    },
    2: SAME | {
        "weight/a": "d0ac9af842da374cfcd5a99c28f4890b50e4954f960d1ba8b729c21e0f9d6d24",
        "random/00000/torch": "257c82419a565063b859089a82c32cba57bb714f20a9406238cad2525284ed51",
        "random/00001/torch": "405334cf5eeb3db03c4be33b311e1623f3ebfd0b9f91c48bcd082aa7464cc584",
    },
}  # fmt: skip
each_version = pytest.mark.parametrize("version", DIGESTS)


@pytest.fixture(params=["sharded", "full"])
def root(request: pytest.FixtureRequest, tmp_path: Path, version: int) -> Path:
    """Return a store with a checkpoint of two ranks in one arrangement, as `version` wrote it."""
    with tarfile.open(Path(__file__).with_name(f"version_{version}.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / str(request.param)


@each_version
def test_everything_is_read_and_verified(root: Path, version: int) -> None:
    assert read_digests(LocalStore(root), NAME) == DIGESTS[version]


@each_version
def test_any_damage_is_found(root: Path, version: int) -> None:
    for file in sorted((root / NAME).iterdir()):
        data = bytearray(file.read_bytes())
        for place in range(3, len(data), 97):
            data[place] ^= 1
            file.write_bytes(data)
            with pytest.raises(CheckpointError):
                read_digests(LocalStore(root), NAME)
            data[place] ^= 1
        file.write_bytes(data)
    assert read_digests(LocalStore(root), NAME) == DIGESTS[version]


@each_version
def test_it_stays_as_it_is_when_it_is_amended(root: Path, version: int) -> None:
    path = root / NAME / MANIFEST
    manifest = Manifest.load(path.read_bytes(), "here")
    path.write_bytes(manifest.model_copy(update={"progress": {"step": 1, "more": 2}}).dump())
    assert CheckpointReader(LocalStore(root), NAME).progress == {"step": 1, "more": 2}
    assert read_digests(LocalStore(root), NAME) == DIGESTS[version]


def pieces(manifest: dict[str, Any], key: str) -> list[list[int]]:
    """Return a tensor's pieces: tensor, file, offset, start, stop."""
    number = [tensor["key"] for tensor in manifest["tensors"]].index(key)
    return [p for part in manifest["parts"] for p in part["pieces"] if p[0] == number]


def change(key: str, field: int, by: int) -> Callable[[dict[str, Any]], None]:
    def changed(manifest: dict[str, Any]) -> None:
        pieces(manifest, key)[0][field] += by

    return changed


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "dropped": (lambda m: m["parts"][1]["pieces"].pop(0), "weight/b: ends at element 45 of 90"),
    "twice": (
        lambda m: m["parts"][1]["pieces"].append(m["parts"][1]["pieces"][0]),
        "weight/b: elements .* are there twice",
    ),
    "moved": (change("weight/b", 2, 4), "weight/b"),
    "of another file": (change("weight/b", 1, 1), "weight/b"),
    "of no file": (change("weight/b", 1, 9), "unknown tensor or file"),
    "of no tensor": (change("weight/b", 0, 9), "unknown tensor or file"),
    "in the header": (change("weight/a", 2, -4096), "weight/a"),
    "shorter": (change("weight/b", 4, -1), "weight/b: elements 44 to 45 are missing"),
}


@pytest.mark.parametrize("version", [1])
@pytest.mark.parametrize("name", EDITS)
def test_an_edited_piece(root: Path, name: str) -> None:
    changed, problem = EDITS[name]
    edit(root, changed)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=problem):
        read_digests(LocalStore(root), NAME)


@pytest.mark.parametrize("version", [2])
def test_a_manifest_of_version_2_stays_as_it_is(root: Path) -> None:
    data = (root / NAME / MANIFEST).read_bytes()
    assert Manifest.load(data, "here").dump() == data


@pytest.mark.parametrize("version", [2])
def test_columns_that_version_2_cannot_have(root: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        runs_of(manifest, "weight/b")[:] = [[0, 90, 90, 0, 0, 1, 0, 10, 2, 1]]

    edit(root, change)
    with pytest.raises(Damaged, match="divided in a way that its version does not have"):
        read_digests(LocalStore(root), NAME)

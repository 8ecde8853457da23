"""Checkpoints of earlier releases, whose manifests list every piece, can be read."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.local_store import LocalStore
from pipeline.checkpoint.manifest import MANIFEST, Manifest
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.errors import CheckpointError
from tests.pipeline.checkpoint.test_damage import NAME, edit
from tests.support.tiny_store import read_digests

ARCHIVE = Path(__file__).with_name("version_1.tar.xz")
"""Checkpoints of two ranks, one of each arrangement, as they were written."""
DIGESTS = {
    "weight/a": "adbf4e88c53c1ff1ecc151345f6fb4299ac39ef7193c589d742a20870f942b8a",
    "weight/b": "67c990332226eb416e0f15c7737c0f079fc3f8fca800373e84303dee3316a03d",
    "exp_avg/b": "2709c675cbb3d4d4207e1d6ba3ec0b08f7fdde9b9087d4e9d597ef84e2dff14b",
    "random/00000/torch": "c5dcc7b20486c22960ed7fa328535a604e955fa8ef07a468345a8d7b764f68ae",
    "random/00001/torch": "d7d60b57d1283a8354e5027033e40cd595852182ea5e852c454bd09f9a76ceed",
}


@pytest.fixture(params=["sharded", "full"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / str(request.param)


def test_everything_is_read_and_verified(root: Path) -> None:
    assert read_digests(LocalStore(root), NAME) == DIGESTS


def test_any_damage_is_found(root: Path) -> None:
    for file in sorted((root / NAME).iterdir()):
        data = bytearray(file.read_bytes())
        for place in range(3, len(data), 97):
            data[place] ^= 1
            file.write_bytes(data)
            with pytest.raises(CheckpointError):
                read_digests(LocalStore(root), NAME)
            data[place] ^= 1
        file.write_bytes(data)
    assert read_digests(LocalStore(root), NAME) == DIGESTS


def test_it_stays_as_it_is_when_it_is_amended(root: Path) -> None:
    path = root / NAME / MANIFEST
    manifest = Manifest.load(path.read_bytes(), "here")
    path.write_bytes(manifest.model_copy(update={"progress": {"step": 1, "more": 2}}).dump())
    assert CheckpointReader(LocalStore(root), NAME).progress == {"step": 1, "more": 2}
    assert read_digests(LocalStore(root), NAME) == DIGESTS


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


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_piece(root: Path, name: str) -> None:
    changed, problem = EDITS[name]
    edit(root, changed)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=problem):
        read_digests(LocalStore(root), NAME)

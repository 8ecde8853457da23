"""Checkpoints of earlier releases, which knew no division by columns, can be read."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.local_store import LocalStore
from pipeline.checkpoint.manifest import MANIFEST, Damaged, Manifest
from pipeline.errors import CheckpointError
from tests.pipeline.checkpoint.test_damage import NAME, edit, runs_of
from tests.support.tiny_store import read_digests

ARCHIVE = Path(__file__).with_name("version_2.tar.xz")
"""Checkpoints of two ranks, one of each arrangement, as they were written."""
DIGESTS = {
    "weight/a": "d0ac9af842da374cfcd5a99c28f4890b50e4954f960d1ba8b729c21e0f9d6d24",
    "weight/b": "67c990332226eb416e0f15c7737c0f079fc3f8fca800373e84303dee3316a03d",
    "exp_avg/b": "2709c675cbb3d4d4207e1d6ba3ec0b08f7fdde9b9087d4e9d597ef84e2dff14b",
    "random/00000/torch": "257c82419a565063b859089a82c32cba57bb714f20a9406238cad2525284ed51",
    "random/00001/torch": "405334cf5eeb3db03c4be33b311e1623f3ebfd0b9f91c48bcd082aa7464cc584",
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


def test_its_manifest_stays_as_it_is(root: Path) -> None:
    data = (root / NAME / MANIFEST).read_bytes()
    assert Manifest.load(data, "here").dump() == data


def test_columns_that_it_cannot_have(root: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        runs_of(manifest, "weight/b")[:] = [[0, 90, 90, 0, 0, 1, 0, 10, 2, 1]]

    edit(root, change)
    with pytest.raises(Damaged, match="divided as its version does not know it"):
        read_digests(LocalStore(root), NAME)

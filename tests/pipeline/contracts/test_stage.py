"""Resources that are too small are reported before training, with their uses."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.contracts import stage
from pipeline.contracts.stage import ResourceNeed, require_resources
from pipeline.errors import StageError

GB = 10**9


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide 10 GB on disk and 4 GB in memory."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10 * GB))
    monkeypatch.setattr(stage, "free_memory", lambda: 4 * GB)


@pytest.mark.usefixtures("little")
def test_memory_that_is_kept_is_not_there_for_others() -> None:
    own, copies = ResourceNeed(what="an export", memory=2 * GB), "copies"
    require_resources([own, ResourceNeed(what=copies, memory=2 * GB, kept=True)])
    with pytest.raises(StageError, match=r"2\.0 GB for an export, 1\.9 GB available"):
        require_resources([own, ResourceNeed(what=copies, memory=2 * GB + GB // 10, kept=True)])
    more = ResourceNeed(what="more", memory=3 * GB, kept=True)
    with pytest.raises(StageError, match=r"3\.0 GB for more, 2\.0 GB available"):
        require_resources([ResourceNeed(what=copies, memory=2 * GB, kept=True), more, own])


@pytest.mark.usefixtures("little")
def test_needs_of_one_file_system_add_up(tmp_path: Path) -> None:
    def needs(disk: int, memory: int) -> list[ResourceNeed]:
        below = tmp_path / "not/yet"
        return [
            ResourceNeed(what="3 checkpoints", disk=disk * GB, folder=tmp_path),
            ResourceNeed(what="the export", disk=4 * GB, folder=below, memory=memory * GB),
        ]

    require_resources(needs(disk=6, memory=4))
    with pytest.raises(StageError) as error:
        require_resources(needs(disk=7, memory=5))
    assert str(error.value) == (
        f"not enough disk space in {tmp_path}: 7.0 GB for 3 checkpoints, 4.0 GB for the export, "
        "10.0 GB available; not enough host memory: 5.0 GB for the export, 4.0 GB available "
        "(make room, or write elsewhere)"
    )

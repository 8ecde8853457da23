"""Resources that are too small are reported before training, with their uses."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.contracts import resources
from pipeline.contracts.resources import ResourceNeed, require_resources
from pipeline.errors import StageError
from pipeline.hardware import host

GB = 10**9


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide 10 GB on disk and 4 GB in memory."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10 * GB))
    monkeypatch.setattr(resources, "free_memory", lambda: 4 * GB)


@pytest.mark.usefixtures("little")
def test_enough(tmp_path: Path) -> None:
    require_resources(
        [
            ResourceNeed(what="checkpoints", disk=6 * GB, folder=tmp_path),
            ResourceNeed(
                what="the export", disk=4 * GB, folder=tmp_path / "not/yet", memory=4 * GB
            ),
        ]
    )


@pytest.mark.usefixtures("little")
def test_memory_that_is_kept_is_not_there_for_others() -> None:
    own, copies = ResourceNeed(what="an export", memory=2 * GB), "copies"
    require_resources([own, ResourceNeed(what=copies, memory=2 * GB, kept=True)])
    with pytest.raises(StageError, match=r"2\.0 GB for an export, 1\.9 GB available"):
        require_resources([own, ResourceNeed(what=copies, memory=2 * GB + GB // 10, kept=True)])
    with pytest.raises(StageError, match=r"3\.0 GB for more, 2\.0 GB available"):
        require_resources(
            [
                ResourceNeed(what=copies, memory=2 * GB, kept=True),
                ResourceNeed(what="more", memory=3 * GB, kept=True),
                own,
            ]
        )


@pytest.mark.usefixtures("little")
def test_needs_of_one_file_system_add_up(tmp_path: Path) -> None:
    with pytest.raises(StageError) as error:
        require_resources(
            [
                ResourceNeed(what="3 checkpoints", disk=7 * GB, folder=tmp_path),
                ResourceNeed(
                    what="the export", disk=4 * GB, folder=tmp_path / "not/yet", memory=5 * GB
                ),
            ]
        )
    assert str(error.value) == (
        f"not enough disk space in {tmp_path}: 7.0 GB for 3 checkpoints, 4.0 GB for the export, "
        "10.0 GB available; not enough host memory: 5.0 GB for the export, 4.0 GB available "
        "(make room, or write elsewhere)"
    )


def test_free_memory_is_that_of_the_system_or_of_a_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    system = int(meminfo["MemAvailable"].split()[0]) * 1024
    monkeypatch.setattr(host, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host, "_OWN", tmp_path / "own")
    assert host.free_memory() == pytest.approx(system, rel=0.2)
    (tmp_path / "own").write_text("0::/job/step\n")
    for folder, limit in (("job/step", "max"), ("job", "1000000")):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "memory.max").write_text(f"{limit}\n")
        (tmp_path / folder / "memory.stat").write_text("anon 400000\nfile 500000\nshmem 100000\n")
    assert host.free_memory() == 500000
    (tmp_path / "own").write_text("4:cpu:/\n3:memory:/old\n")
    (tmp_path / "memory/old").mkdir(parents=True)
    (tmp_path / "memory/old/memory.limit_in_bytes").write_text("700000\n")
    (tmp_path / "memory/old/memory.stat").write_text("rss 1000\n")
    assert host.free_memory() == 699000

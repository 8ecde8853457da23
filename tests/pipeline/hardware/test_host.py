"""Resources of this machine that processes may use."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from click.testing import CliRunner

from pipeline.cli import main
from pipeline.errors import UsageError
from pipeline.hardware import host


@pytest.fixture(params=["v2", "v1"])
def quota(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return a control group of either version that allows 5.5 of 64 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(host, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host, "_OWN", tmp_path / "own")
    if request.param == "v2":
        (tmp_path / "own").write_text("0::/box\n")
        folder, files = tmp_path / "box", {"cpu.max": "550000 100000"}
    else:
        (tmp_path / "own").write_text("3:cpu,cpuacct:/box\n")
        folder = tmp_path / "cpu/box"
        files = {"cpu.cfs_quota_us": "550000", "cpu.cfs_period_us": "100000"}
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


@pytest.mark.usefixtures("quota")
def test_cores_of_a_quota_are_shared() -> None:
    assert host.usable_cores() == 5.5
    assert [host.cores_each(procs) for procs in (1, 2, 5, 64)] == [5, 2, 1, 1]


def test_cores_where_the_system_has_no_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(host, "_OWN", Path("/none"))
    assert host.usable_cores() == 3


def test_an_export_takes_as_many_processes_as_there_are_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recipe_text(choice: object, given: object, count: int) -> str:
        raise UsageError(f"{count} processes")

    choice = SimpleNamespace(job=tmp_path)
    monkeypatch.setattr("pipeline.execution.export_recipe.chosen", lambda *_, **__: choice)
    monkeypatch.setattr("pipeline.execution.export_recipe.recipe_text", recipe_text)
    monkeypatch.setattr(host, "usable_cores", lambda: 2.5)
    assert CliRunner().invoke(main, ["export", "run"]).stderr == "error: 2 processes\n"


def test_cores_and_memory_of_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host, "_OWN", tmp_path / "own")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    system = host.total_memory()
    assert system == psutil.virtual_memory().total
    assert host.usable_cores() == 8
    (tmp_path / "own").write_text("0::/job/step\n")
    for place, quota, limit in (
        ("job/step", "max 100000", "max"),
        ("job", "150000 100000", "9000"),
    ):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / "cpu.max").write_text(f"{quota}\n")
        (tmp_path / place / "memory.max").write_text(f"{limit}\n")
    assert host.usable_cores() == 1.5
    assert host.total_memory() == 9000
    (tmp_path / "own").write_text("4:cpu,cpuacct:/old\n3:memory:/old\n0::/\n")
    (tmp_path / "cpu/old").mkdir(parents=True)
    (tmp_path / "cpu/old/cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu/old/cpu.cfs_period_us").write_text("100000\n")
    assert host.usable_cores() == 8
    (tmp_path / "cpu/old/cpu.cfs_quota_us").write_text("300000\n")
    assert host.usable_cores() == 3


def test_processes_of_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host, "_OWN", tmp_path / "own")
    (tmp_path / "own").write_text("0::/job/step\n")
    (tmp_path / "job/step").mkdir(parents=True)
    (tmp_path / "job/step/pids.max").write_text("max\n")
    assert host.most_processes() is None
    (tmp_path / "job/pids.max").write_text("512\n")
    assert host.most_processes() == 512
    (tmp_path / "own").write_text("7:pids:/old\n0::/\n")
    (tmp_path / "pids/old").mkdir(parents=True)
    (tmp_path / "pids/old/pids.max").write_text("100\n")
    assert host.most_processes() == 100


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

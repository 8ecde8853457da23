"""The inventory read from the system."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.doctor import inventory
from pipeline.hardware import host


def test_processor(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: AMD EPYC 9654\n")
    assert inventory._search(inventory.MODEL, tmp_path / "cpuinfo") == "AMD EPYC 9654"
    assert inventory.host().cores == host.usable_cores()


def test_environment_holds_no_secrets() -> None:
    given = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "hf_x", "OMP_NUM_THREADS": "1", "GLOO_X": "1"}
    expected = {"GLOO_X": "1", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"}
    assert inventory.environment(given) == expected


def test_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "status"
    file.write_text("Name:\tpython\nCapEff:\t0000000000004000\n")
    assert inventory._search(inventory.CAPABILITIES, file) == "0000000000004000"
    assert inventory._search(inventory.CAPABILITIES, tmp_path / "none") is None
    assert set(inventory.kernel().limits) == {"open_files", "locked_memory", "processes"}
    found: dict[str, str | None] = {}
    monkeypatch.setattr(inventory, "_search", lambda pattern, _: found.get(pattern))
    for capabilities, freely in (("4000", True), ("0", False), (None, None)):
        found[inventory.CAPABILITIES] = capabilities
        assert inventory.kernel().locks_freely is freely


def test_the_nearest_mount_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = [("/", "ext4"), ("/data", "autofs"), ("/data", "nfs4"), ("/database", "xfs")]
    found = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in mounts]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: found)
    assert inventory.filesystem(Path("/data/runs")) == "nfs4"
    assert inventory.filesystem(Path("/home")) == "ext4"
    runs, temporary = inventory.folders(tmp_path)
    assert (runs.path, runs.writable) == (str(tmp_path), True)
    assert temporary.use == "temporary files"


def test_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def state(up: bool, speed: int, flags: str) -> SimpleNamespace:
        return SimpleNamespace(isup=up, speed=speed, flags=flags)

    states = {
        "lo": state(True, 0, "up,loopback,running"),
        "eth1": state(False, 1000, "broadcast"),
        "eth0": state(True, 25000, "up,broadcast"),
        "tun0": state(True, 0, "up"),
    }
    monkeypatch.setattr("psutil.net_if_stats", lambda: states)
    found = [(each.name, each.bits_per_s) for each in inventory.network().interfaces]
    assert found == [("eth0", 25e9), ("tun0", None)]


def test_the_torch_that_torchvision_was_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        if name != "torchvision":
            raise importlib.metadata.PackageNotFoundError(name)
        return ["numpy", "torch==2.12.0", "pillow!=8.3.*,>=5.3.0"]

    monkeypatch.setattr("importlib.metadata.requires", requires)
    assert inventory.needs_torch() == {"torchvision": "2.12.0"}


def test_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "clang++ -O2")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    assert inventory.operators().compiler is None
    assert inventory.operators().cuda_home is None
    (tmp_path / "bin").mkdir()
    for name in ("clang++", "ninja", "bin/nvcc"):
        (tmp_path / name).touch(mode=0o755)
    tools = inventory.operators()
    assert (tools.compiler, tools.ninja, tools.cuda_home) == (
        str(tmp_path / "clang++"),
        str(tmp_path / "ninja"),
        str(tmp_path),
    )

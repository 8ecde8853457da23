"""Findings in a described machine."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.doctor.examine import FULL, QUICK
from pipeline.doctor.measurements import bandwidth
from pipeline.doctor.report import (
    Device,
    Failure,
    Finding,
    Folder,
    Limit,
    Link,
    MachineReport,
    Network,
    Record,
    Topology,
)
from pipeline.doctor.rules import LARGE, advice, findings

GB = 10**9
H100 = Device(name="H100", memory_bytes=80 * GB, compute_capability="9.0")
V100 = Device(name="V100", memory_bytes=16 * GB, compute_capability="7.0")


def changed(machine: MachineReport, section: str | None = None, **values: Any) -> MachineReport:
    if section is None:
        return machine.model_copy(update=values)
    part: Record = getattr(machine, section)
    return machine.model_copy(update={section: part.model_copy(update=values)})


def limited(machine: MachineReport, name: str, soft: int | None) -> MachineReport:
    limits = machine.kernel.limits | {name: Limit(soft=soft, hard=soft)}
    return changed(machine, "kernel", limits=limits)


def folder(machine: MachineReport, **values: Any) -> MachineReport:
    return machine.model_copy(update={"folders": (machine.folders[0].model_copy(update=values),)})


def only(machine: MachineReport) -> Finding:
    (finding,) = findings(machine)
    return finding


def told(machine: MachineReport) -> tuple[str, str, str]:
    finding = only(machine)
    return finding.severity, finding.name, finding.seen


def linked(machine: MachineReport, *kinds: str) -> MachineReport:
    """Return the machine with these paths between its four GPUs, pair by pair."""
    pairs = itertools.combinations(range(4), 2)
    links = (Link(a=f"GPU{a}", b=f"GPU{b}", kind=k) for (a, b), k in zip(pairs, kinds, strict=True))
    return changed(machine, topology=Topology(links=tuple(links)))


@pytest.fixture
def gpus(healthy: MachineReport) -> MachineReport:
    machine = changed(healthy, device="cuda", devices=(H100,) * 4)
    return changed(machine, "operators", cuda_home="/usr/local/cuda")


def test_nothing_hurts(healthy: MachineReport, gpus: MachineReport) -> None:
    """A rule that is not told something is silent: a file that a person wrote for a machine
    elsewhere leaves parts out."""
    assert findings(healthy) == []
    needed = {name for name, field in MachineReport.model_fields.items() if field.is_required()}
    assert findings(MachineReport.model_validate(healthy.model_dump(include=needed))) == []
    assert findings(linked(gpus, *["NV18"] * 6)) == []


OLD = "The NVIDIA driver on your system is too old (found version 11040)."
BROKEN = "torch cannot be imported: libcudart.so.13: cannot open shared object file"


@pytest.mark.parametrize(
    ("software", "expected"),
    [
        (
            {"gpus": 8},
            ("error", "driver", "8 GPUs, but torch 2.13.0+cpu was built without CUDA"),
        ),
        (
            {"gpus": 2, "driver": "470.57.02", "torch_cuda": "13.0", "torch_problem": OLD,
             "packages": {"torch": "2.13.0"}},
            ("error", "driver", "2 GPUs, but torch 2.13.0 for CUDA 13.0 cannot use them under "
             f"driver 470.57.02: {OLD}"),
        ),
        (
            {"torch_cuda": "13.0"},
            ("warning", "no-driver",
             "torch is built for CUDA 13.0, but there is no GPU with a driver"),
        ),
        ({"packages": {}}, ("error", "torch", "torch is not installed")),
        ({"torch_problem": BROKEN}, ("error", "torch", BROKEN)),
    ],
)  # fmt: skip
def test_a_torch_that_cannot_be_used(
    healthy: MachineReport, software: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    assert told(changed(healthy, "software", **software)) == expected


def test_some_gpus_cannot_be_used(gpus: MachineReport) -> None:
    machine = changed(gpus, "software", gpus=8, torch_cuda="13.0")
    assert told(machine) == ("error", "driver", "8 GPUs, but torch 2.13.0+cpu can use 4 only")


@pytest.mark.parametrize(
    ("torch", "own", "needed", "fits"),
    [
        ("2.13.0+cpu", "0.28.0", "2.13.0", True),
        ("2.13.0+cpu", "0.28.0+cpu", "2.13.0", True),
        ("2.13.0+cu130", "0.28.0+cu130", "2.13.0+cu130", True),
        ("2.13.0+cpu", "0.28.0+cu130", "2.13.0", False),
        ("2.13.0+cpu", "0.27.0", "2.12.0", False),
    ],
)
def test_torchvision_of_another_build(
    healthy: MachineReport, torch: str, own: str, needed: str, fits: bool
) -> None:
    packages = {"torch": torch, "torchvision": own}
    machine = changed(healthy, "software", packages=packages, needs_torch={"torchvision": needed})
    seen = f"torchvision {own} was built for torch {needed}, but torch is {torch}"
    expected = [] if fits else [("error", "torchvision", seen)]
    found = findings(machine)
    assert [(finding.severity, finding.name, finding.seen) for finding in found] == expected


def test_operators(healthy: MachineReport) -> None:
    compiler = ("warning", "compiler", "no C++ compiler")
    assert told(changed(healthy, "operators", compiler=None)) == compiler
    both = changed(healthy, "operators", compiler=None, ninja=None)
    assert told(both)[2] == "no C++ compiler and no ninja"
    assert told(changed(healthy, "operators", libaio=False))[:2] == ("note", "libaio")
    assert told(changed(healthy, devices=(H100,)))[:2] == ("warning", "cuda-home")


@pytest.mark.parametrize(
    ("kinds", "name", "seen"),
    [
        (
            ("NV4", *["SYS"] * 4, "NV4"), "across-numa",
            "GPU0-GPU2, GPU0-GPU3, GPU1-GPU2, GPU1-GPU3: only over the link between processors "
            "(SYS)",
        ),
        (
            ("PIX", "PHB", "NODE", "NODE", "NODE", "PXB"), "no-nvlink",
            "GPU0-GPU1, GPU0-GPU2, GPU0-GPU3, GPU1-GPU2 and 2 more pairs: no NVLink, only PCIe "
            "(NODE, PHB, PIX, PXB)",
        ),
    ],
)  # fmt: skip
def test_slow_links_are_named(
    gpus: MachineReport, kinds: tuple[str, ...], name: str, seen: str
) -> None:
    assert told(linked(gpus, *kinds)) == ("warning", name, seen)


def test_nvlink_that_is_not_used(gpus: MachineReport) -> None:
    machine = linked(gpus, *["NV18"] * 6)
    slow = (bandwidth("allreduce", 256 << 20, 0.05, 2),)
    assert told(changed(machine, allreduce=slow)) == (
        "warning",
        "nvlink-unused",
        "all-reduce has a bus bandwidth of 5.4 GB/s, though NVLink connects all GPUs",
    )
    assert all(max(pace.sizes) >= LARGE for pace in (FULL, QUICK))  # which it goes by
    fast = (bandwidth("allreduce", 256 << 20, 0.001, 2),)
    assert findings(changed(machine, allreduce=fast)) == []


def test_old_unlike_and_busy_gpus(gpus: MachineReport) -> None:
    found = findings(changed(gpus, devices=(H100, V100)))
    assert [(finding.name, finding.seen) for finding in found] == [
        ("bf16", "V100 has compute capability 7.0, below 8.0"),
        ("unlike-gpus", "GPUs of different kinds: H100, V100"),
    ]
    ampere = H100.model_copy(update={"compute_capability": "8.0"})
    assert findings(changed(gpus, devices=(ampere,))) == []
    busy = H100.model_copy(update={"memory_free_bytes": 20 * GB})
    in_use = ("warning", "gpu-in-use", "GPU1 has 20.0 GB of 80.0 GB free")
    assert told(changed(gpus, devices=(H100, busy))) == in_use
    numbered = busy.model_copy(update={"number": 6})
    assert told(changed(gpus, devices=(H100, numbered)))[2].startswith("GPU6 has")


@pytest.mark.parametrize(
    ("measurement", "late", "severity"),
    [
        ("collectives", False, "error"),
        ("torch", False, "error"),
        ("collectives", True, "warning"),
        ("matmul", True, "warning"),
        ("disk", False, "warning"),
    ],
)
def test_failed_measurements(
    healthy: MachineReport, measurement: str, late: bool, severity: str
) -> None:
    failures = (Failure(measurement=measurement, reason="why", late=late),)
    expected = (severity, "failed", f"{measurement}: why")
    assert told(changed(healthy, failures=failures)) == expected


def test_a_torch_that_told_nothing_is_one_finding(healthy: MachineReport) -> None:
    machine = changed(healthy, "software", gpus=8)
    late = Failure(measurement="torch", reason="given up after 80 s", late=True)
    slow = ("warning", "slow-import", "importing torch was given up after 80 s")
    assert told(changed(machine, failures=(late,))) == slow
    killed = Failure(measurement="torch", reason="its process was killed (SIGSEGV)")
    assert told(changed(machine, failures=(killed,)))[:2] == ("error", "failed")


def test_a_slow_disk_in_minutes(healthy: MachineReport) -> None:
    finding = only(changed(healthy, disk_write_bytes_per_s=50e6))
    assert (finding.severity, finding.name) == ("warning", "slow-disk")
    assert finding.seen == "50.0 MB/s are written"
    # 7e9 weights * 12 bytes / 50e6 bytes/s / 60 s
    assert finding.why == "the checkpoint of a 7B model with its AdamW, 84.0 GB, takes 28 min"


def test_a_busy_machine_is_not_blamed_on_its_disk(healthy: MachineReport) -> None:
    late = Failure(measurement="torch", reason="not done within 40 s", late=True)
    slow = {"disk_write_bytes_per_s": 50e6, "failures": (late,)}
    assert {each.name for each in findings(changed(healthy, **slow))} >= {"slow-disk"}
    busy = [each.name for each in findings(changed(healthy, **slow, load=0.5))]
    assert "busy" in busy
    assert not {"slow-disk", "slow-import"} & {*busy}
    assert findings(changed(healthy, load=0.4)) == findings(healthy)


def test_memory_and_processes(healthy: MachineReport) -> None:
    docker = {"shared_memory_bytes": 64 << 20, "shared_memory_free_bytes": 64 << 20}
    shared, locked = (
        changed(healthy, "kernel", **docker),
        limited(healthy, "locked_memory", 8 << 20),
    )
    for machine, name, seen in (
        (shared, "shared-memory", "/dev/shm has 67.1 MB of 67.1 MB free, for 2 processes"),
        (locked, "locked-memory", "8.4 MB of memory may be locked (ulimit -l)"),
        (
            changed(healthy, "host", memory_free_bytes=GB),
            "host-memory", "1.0 GB of 64.0 GB of host memory are free",
        ),
        (changed(healthy, procs=16), "cores", "16 processes share 8 cores"),
        (
            limited(healthy, "open_files", 1024),
            "open-files", "a process may open 1024 files (ulimit -n)",
        ),
        (
            limited(healthy, "processes", 512),
            "processes", "512 processes and threads are allowed (ulimit -u)",
        ),
        (
            changed(healthy, "kernel", processes_in_group=1024),
            "processes", "1024 processes and threads are allowed (pids.max of the control group)",
        ),
    ):  # fmt: skip
        assert told(machine) == ("warning", name, seen)
    assert findings(changed(shared, procs=1)) == []
    assert findings(changed(locked, "kernel", locks_freely=True)) == []


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("OMP_NUM_THREADS", "4", None),
        ("OMP_NUM_THREADS", "5", "threads"),
        ("OMP_NUM_THREADS", "1", None),
        ("NCCL_P2P_DISABLE", "1", "slow-switch"),
        ("NCCL_P2P_DISABLE", "0", None),
        ("NCCL_IB_DISABLE", "1", None),  # there is none to disable
        ("CUDA_LAUNCH_BLOCKING", "1", "slow-switch"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "slow-switch"),
        ("TORCH_DISTRIBUTED_DEBUG", "INFO", None),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "slow-switch"),
    ],
)
def test_environment(
    healthy: MachineReport, variable: str, value: str, expected: str | None
) -> None:
    machine = changed(healthy, environment={variable: value})
    assert [finding.name for finding in findings(machine)] == ([expected] if expected else [])
    if expected:
        assert only(machine).seen.startswith(f"{variable}={value}")


def test_infiniband_that_is_switched_off(healthy: MachineReport) -> None:
    network = Network(rdma=("mlx5_0",))
    machine = changed(healthy, environment={"NCCL_IB_DISABLE": "1"}, network=network)
    assert told(machine) == ("warning", "slow-switch", "NCCL_IB_DISABLE=1")


@pytest.mark.parametrize(
    ("values", "severity", "name", "seen"),
    [
        ({"writable": False}, "error", "not-writable", "/data, for runs, cannot be written to"),
        ({"free_bytes": GB}, "warning", "disk-space", "/data has 1.0 GB free"),
        ({"filesystem": "nfs4"}, "warning", "network-folder", "/data, for runs, is on nfs4"),
        ({"filesystem": "tmpfs"}, "warning", "folder-in-memory", "/data is on tmpfs"),
    ],
)
def test_folders(
    healthy: MachineReport, values: dict[str, Any], severity: str, name: str, seen: str
) -> None:
    assert told(folder(healthy, **values)) == (severity, name, seen)
    place = Folder(
        use="temporary files", path="/tmp", filesystem="tmpfs", free_bytes=GB, writable=True
    )
    assert findings(changed(healthy, folders=(place,))) == []


def test_the_worst_comes_first(healthy: MachineReport) -> None:
    machine = folder(healthy, writable=False, free_bytes=GB)
    machine = changed(machine, "operators", libaio=False)
    assert [finding.severity for finding in findings(machine)] == ["error", "warning", "note"]


def test_every_finding_has_advice_and_is_documented() -> None:
    """findings.toml has exactly the findings of the rules; docs/dev/doctor.md their severity."""
    root = Path(__file__).parents[3]
    rules = (root / "pipeline/doctor/rules.py").read_text()
    assert set(re.findall(r'yield "([\w-]+)"', rules)) == set(advice())
    documented = (root / "docs/dev/doctor.md").read_text()
    row = r"^\| `([\w-]+)` \| (error|warning|note|error, warning) \|"
    rows = re.findall(row, documented, re.MULTILINE)
    severities = {name: texts["severity"] for name, texts in advice().items()}
    assert dict(rows) == {**severities, "failed": "error, warning"}

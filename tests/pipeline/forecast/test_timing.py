from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.accelerators import ACCELERATORS, find_accelerator
from pipeline.errors import UsageError
from pipeline.forecast.fit import Margins, shortages
from pipeline.forecast.hardware import Asked, hardware_of, site_of
from pipeline.forecast.ledger import Peak
from pipeline.forecast.placement import Copies, Traffic
from pipeline.forecast.result import Forecast, Step, Storage, Work
from pipeline.forecast.site import Hardware, Site
from pipeline.forecast.timing import crosses, sent, step_time

GIB = 1 << 30


def forecast(*traffic: Traffic, device: int = 0, host: int = 0, disk: int = 0) -> Forecast:
    return Forecast(
        device={"backward": Peak(bytes=device, items={"x": device})},
        host={"load": Peak(bytes=host, items={"x": host})},
        disk={},
        storage=[Storage(what="export", bytes=disk, formula="")],
        formulas={},
        traffic=traffic,
        copies=Copies(up=40, down=30, disk=6),
        step=Step(
            microbatches=1,
            tokens=8,
            samples=2,
            work=Work(useful=300.0, again=100.0),
            moved=70,
        ),
    )


def traffic(collective: str, size: int, ranks: int, apart: int = 1) -> Traffic:
    return Traffic(collective=collective, bytes=size, ranks=ranks, apart=apart, what="x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("collective", "expected"),
    [("all-gather", 75.0), ("reduce-scatter", 75.0), ("all-reduce", 150.0)],
)
def test_a_rank_sends_what_the_best_algorithms_send(collective: str, expected: float) -> None:
    assert sent(traffic(collective, 100, 4)) == expected


def test_parts_of_a_step() -> None:
    told = forecast(traffic("all-gather", 100, 4))
    site = Site(ranks=4, local_ranks=4, device="cuda")
    hardware = Hardware(flops=100.0, peers=25.0, host_link=10.0, disk_rate=8.0)
    time = step_time(told, site, hardware)
    assert time is not None
    assert time.parts == {
        "compute": 4.0, "PCIe to the GPU": 4.0, "PCIe to the host": 3.0, "NVMe": 3.0,
        "network": 3.0,
    }  # fmt: skip
    # Both directions at once, or one after the other.
    assert (time.least, time.most) == (4.0, 17.0)
    assert time.bound in ("compute", "PCIe to the GPU")
    assert time.unknown == ["memory"]


def test_between_nodes_ranks_share_what_a_node_sends() -> None:
    hardware = Hardware(network=10.0, peers=100.0)
    wide = Site(ranks=8, local_ranks=4, device="cuda")
    # One ring through all ranks: a node's whole rate. Each of four groups of two: a quarter of it.
    ring = step_time(forecast(traffic("all-gather", 80, 8)), wide, hardware)
    pairs = step_time(forecast(traffic("all-gather", 80, 2, apart=4)), wide, hardware)
    assert ring is not None
    assert pairs is not None
    assert ring.parts["network"] == pytest.approx(70 / 10)
    assert pairs.parts["network"] == pytest.approx(40 / 2.5)


@pytest.mark.parametrize(
    ("ranks", "size", "apart", "seconds"),
    [
        (8, 8, 1, 0),  # one node
        (16, 8, 1, 0),  # each node a group
        (16, 2, 4, 0),  # 0 and 4, ..., 11 and 15
        (16, 16, 1, 75 / 10),
        (16, 2, 8, 40 / (10 / 8)),  # each rank of a node with one of the other
        # Of four groups of six, 6 to 11 and 12 to 17 are on two nodes each, and both on the second.
        (24, 6, 1, 200 / 3 / (10 / 2)),
        # 0 and 6, 1 and 7 are on the first node; 2 and 8, ..., 5 and 11 are not.
        (12, 2, 6, 40 / (10 / 4)),
        (12, 12, 1, 220 / 3 / 10),  # the second node has four ranks
    ],
)
def test_groups_that_do_not_divide_nodes(ranks: int, size: int, apart: int, seconds: float) -> None:
    """Of nodes with eight ranks."""
    site = Site(ranks=ranks, local_ranks=8, device="cuda")
    told = traffic("all-gather", 80, size, apart)
    assert crosses(told, site) == (seconds > 0)
    time = step_time(forecast(told), site, Hardware(network=10.0))
    assert time is not None
    assert time.parts.get("network", 0) == pytest.approx(seconds)


def test_a_network_that_is_not_known_is_named() -> None:
    site = Site(ranks=16, local_ranks=8, device="cuda")
    time = step_time(forecast(traffic("all-reduce", 8, 16)), site, Hardware(peers=1.0))
    assert time is not None
    assert "network" in time.unknown


def test_what_is_too_little() -> None:
    told = forecast(device=70 * GIB, host=100 * GIB, disk=1000)
    site = Site(ranks=8, local_ranks=8, device="cuda")
    hardware = Hardware(device_memory=73 * GIB, host_memory=99 * GIB, disk=999)
    found = list(shortages(told, site, hardware, Margins()))
    assert [short.what for short in found] == ["memory of a GPU", "host memory of a node", "disk"]
    # 3 % and 1.5 GiB beside the tensors
    assert found[0].needed == round(70 * GIB * 1.03) + round(1.5 * GIB)
    enough = Hardware(device_memory=74 * GIB, host_memory=100 * GIB, disk=1000)
    assert not list(shortages(told, site, enough, Margins()))
    assert not list(shortages(told, site, Hardware(), Margins()))


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("NVIDIA H100 80GB HBM3", 79.2), ("NVIDIA A100-SXM4-40GB", 39.4), ("h200", 139.8),
        ("NVIDIA A100 80GB PCIe", 79.2), ("NVIDIA GeForce RTX 4090", 23.6), ("l4", 22.0),
    ],
)  # fmt: skip
def test_devices_are_found_by_their_own_names(name: str, memory: float) -> None:
    found = find_accelerator(name)
    assert found is not None
    assert found.memory == round(memory * GIB)


def test_each_known_device_is_found_by_its_name() -> None:
    for device in ACCELERATORS:
        assert find_accelerator(device.name) is device


def test_machines_that_are_asked_about() -> None:
    asked = Asked(gpus=4, nodes=2, gpu="H100", memory=60, host_memory=500, interconnect="400g")
    assert asked.overrides == ["launch.procs=8", "launch.device=cuda"]
    site = site_of(asked, 8, "cuda")
    assert (site.ranks, site.local_ranks, site.nodes) == (8, 4, 2)
    hardware = hardware_of(asked, site, compute="bf16")
    assert hardware.device_memory == 60 * GIB
    assert hardware.host_memory == 500 * GIB
    assert hardware.network == 50e9
    assert hardware.flops == 989.5e12
    assert hardware_of(asked, site, compute="fp32").flops == 67e12


def test_nodes_alone_are_of_eight() -> None:
    asked = Asked(nodes=4)
    assert asked.overrides == ["launch.procs=32"]
    assert site_of(asked, 32, "cuda").local_ranks == 8


def test_a_measured_machine_goes_before_data_sheets(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    machine = {
        "schema_version": 1,
        "devices": [{"name": "H100", "memory_bytes": 7 * GIB, "compute_capability": "9.0"}],
        "procs": 8,
        "host_memory_bytes": 99 * GIB,
        "matmul_flops": {"fp32": 5e13, "bf16": 7e14},
        "allreduce": [
            {"bytes": 1024, "seconds": 1.0, "algbw": 1.0, "busbw": 1.0},
            {"bytes": 1 << 28, "seconds": 1.0, "algbw": 2e11, "busbw": 3.5e11},
        ],
        "allgather": [],
        "host_copy_bytes_per_s": 1e10,
        "h2d_bytes_per_s": 5e10,
        "d2h_bytes_per_s": None,
        "disk_write_bytes_per_s": 1e9,
        "disk_read_bytes_per_s": 2e9,
        "device": "cuda",
    }
    file.write_text(json.dumps(machine), "utf-8")
    site = Site(ranks=8, local_ranks=8, device="cuda")
    asked = Asked(gpu="H100", machine=file, host_memory=50)
    found = hardware_of(asked, site, compute="bf16")
    assert found.measured
    assert (found.flops, found.peers, found.host_link) == (7e14, 3.5e11, 5e10)
    assert (found.device_memory, found.host_memory) == (7 * GIB, 50 * GIB)
    assert found.bandwidth == 3350e9  # it says nothing of this
    with pytest.raises(UsageError, match="computes on cuda, the recipe on cpu"):
        hardware_of(asked, Site(ranks=8, local_ranks=8, device="cpu"), compute="bf16")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (Asked(gpu="H10"), "--gpu H10: nobody knows it here.*did you mean `H100`"),
        (Asked(gpu="H100", interconnect="fast"), "--interconnect fast: neither a name nor"),
    ],
)
def test_names_that_nobody_knows(asked: Asked, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hardware_of(asked, Site(ranks=8, local_ranks=8, device="cuda"), compute="bf16")

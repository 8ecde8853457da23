from __future__ import annotations

import random
from collections import Counter

import pytest
from pipeline.forecast.fit import Margins, shortages
from pipeline.forecast.ledger import Peak
from pipeline.forecast.placement import Copies, Traffic
from pipeline.forecast.result import Forecast, Step, Work
from pipeline.forecast.site import Hardware, Site
from pipeline.forecast.timing import crosses, sent, step_time

GIB = 1 << 30


def forecast(*traffic: Traffic, device: int = 0, host: int = 0) -> Forecast:
    return Forecast(
        device={"backward": Peak(bytes=device, items={"x": device})},
        host={"load": Peak(bytes=host, items={"x": host})},
        disk={},
        storage=[],
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


def listed(told: Traffic, site: Site) -> int:
    """Groups of several nodes on the node that has most of them, by listing every rank."""
    found, span = Counter[int](), told.ranks * told.apart
    for block in range(0, site.ranks, span):
        for first in range(block, block + told.apart):
            nodes = {r // site.local_ranks for r in range(first, first + span, told.apart)}
            found.update(nodes if len(nodes) > 1 else ())
    return max(found.values(), default=0)


def test_groups_are_counted_without_listing_ranks() -> None:
    draws = random.Random(0)
    for _ in range(4000):
        size, apart = draws.randint(1, 12), draws.randint(1, 12)
        ranks = size * apart * draws.randint(1, 20)
        site = Site(ranks=ranks, local_ranks=draws.randint(1, min(20, ranks)), device="cuda")
        told = traffic("all-gather", 80 * size, size, apart)
        groups = listed(told, site)
        assert crosses(told, site) == (groups > 0)
        time = step_time(forecast(told), site, Hardware(network=1.0))
        assert time is not None
        expected = sent(told) * groups
        assert time.parts.get("network", 0) == pytest.approx(expected), (told, site)


def test_many_nodes_take_no_longer() -> None:
    site = Site(ranks=10**13, local_ranks=64, device="cuda")
    for told in (traffic("all-gather", 80, 10**13), traffic("all-gather", 80, 10**5, 10**8)):
        assert crosses(told, site)


def test_a_network_that_is_not_known_is_named() -> None:
    site = Site(ranks=16, local_ranks=8, device="cuda")
    time = step_time(forecast(traffic("all-reduce", 8, 16)), site, Hardware(peers=1.0))
    assert time is not None
    assert "network" in time.unknown


def test_what_is_too_little() -> None:
    told = forecast(device=70 * GIB, host=100 * GIB)
    site = Site(ranks=8, local_ranks=8, device="cuda")
    hardware = Hardware(device_memory=73 * GIB, host_memory=99 * GIB)
    found = list(shortages(told, site, hardware, Margins()))
    assert [short.what for short in found] == ["memory of a GPU", "host memory of a node"]
    # 3 % and 1.5 GiB beside the tensors
    assert found[0].needed == round(70 * GIB * 1.03) + round(1.5 * GIB)
    enough = Hardware(device_memory=74 * GIB, host_memory=100 * GIB)
    assert not list(shortages(told, site, enough, Margins()))
    assert not list(shortages(told, site, Hardware(), Margins()))

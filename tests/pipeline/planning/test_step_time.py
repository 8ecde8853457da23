"""The time of a step, and the speed that follows."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.contracts.training import TrainingLength
from pipeline.planning.estimate import Work
from pipeline.planning.forecast import Copies, Traffic
from pipeline.planning.hardware import MEASURED, Hardware, Rate
from pipeline.planning.shapes import Topology
from pipeline.planning.step_time import ATTENTION, PRODUCTS, leaving, sent, speed, step_time

FOUR = Topology(ranks=4, local_ranks=4, device="cuda")
WORK = Work(products=300.0, attention=50.0, again=50.0, moved=70.0)
COPIES = Copies(up=40, down=30, disk=6)


def estimate(
    *traffic: Traffic, work: Work = WORK, copies: Copies = COPIES, steps: int | None = None
) -> Any:
    step = SimpleNamespace(tokens=80, length=TrainingLength(steps=steps))
    return SimpleNamespace(traffic=traffic, copies=copies, step=step, work=work)


def traffic(collective: str, size: int, ranks: int, apart: int = 1) -> Traffic:
    return Traffic(collective=collective, bytes=size, ranks=ranks, apart=apart, what="x")  # type: ignore[arg-type]


def rates(measured: bool = False, **values: float) -> dict[str, Rate]:
    names = {
        "flops": "compute", "bandwidth": "memory", "peers": "network inside nodes",
        "network": "network between nodes", "up": "PCIe to the GPU", "down": "PCIe to the host",
        "disk": "NVMe",
    }  # fmt: skip
    origin = MEASURED if measured else "data sheet"
    return {names[name]: Rate(value, origin) for name, value in values.items()}


@pytest.mark.parametrize(
    ("kind", "size"), [("all-gather", 75.0), ("reduce-scatter", 75.0), ("all-reduce", 150.0)]
)
def test_a_rank_sends_what_the_best_algorithms_send(kind: str, size: float) -> None:
    assert sent(traffic(kind, 100, 4)) == size


def test_the_bound_takes_every_resource_at_its_full_rate() -> None:
    hardware = Hardware(rates=rates(flops=100.0, peers=25.0, up=10.0, down=10.0, disk=8.0))
    time = step_time(estimate(traffic("all-gather", 100, 4)), FOUR, hardware)
    assert time.parts == {
        "compute": 4.0, "PCIe to the GPU": 4.0, "PCIe to the host": 3.0, "NVMe": 3.0,
        "network inside nodes": 3.0,
    }  # fmt: skip
    assert (time.least, time.bound, time.unknown) == (4.0, "compute", ["memory"])


def test_the_expectation_takes_rates_that_programs_reach() -> None:
    hardware = Hardware(matmul=0.5, rates=rates(flops=100.0, bandwidth=70.0, peers=25.0))
    time = step_time(estimate(traffic("all-gather", 100, 4), copies=Copies()), FOUR, hardware)
    share = 0.5 * PRODUCTS
    compute, memory, network = 3.5 / share + 0.5 / share / ATTENTION, 1 / 0.75, 3 / 0.75
    assert list(time.reached.values()) == pytest.approx([compute, memory, network])
    # A fifth of the network's time is not hidden.
    assert time.expected == pytest.approx(compute + memory + network / 5)
    slow = step_time(estimate(traffic("all-gather", 1000, 4), copies=Copies()), FOUR, hardware)
    assert slow.expected == pytest.approx(10 * network + (compute + memory) / 5)


def test_measured_rates_are_those_that_programs_reach() -> None:
    hardware = Hardware(matmul=0.5, rates=rates(measured=True, flops=100.0, peers=25.0))
    work = Work(products=300.0, attention=0.0, again=0.0, moved=0.0)
    told = estimate(traffic("all-gather", 100, 4), work=work, copies=Copies())
    time = step_time(told, FOUR, hardware)
    assert time.reached == time.parts == {"compute": 3.0, "network inside nodes": 3.0}
    assert time.expected == pytest.approx(3.6)
    # The cores of a CPU compute and communicate.
    assert step_time(told, replace(FOUR, device="cpu"), hardware).expected == 6.0


def test_speed_and_cost_of_a_training() -> None:
    hardware = Hardware(peak=100.0, price=2.5, rates=rates(measured=True, flops=100.0))
    work = Work(products=300.0, attention=0.0, again=100.0, moved=0.0)
    told = estimate(work=work, copies=Copies(), steps=1800)
    found = speed(step_time(told, FOUR, hardware), told, FOUR, hardware)
    assert found is not None
    assert found.tokens_per_second == 20.0
    assert found.mfu == 0.75  # recomputation does not count as the model's operations
    assert (found.hours, found.cost) == (2.0, 2.0 * 4 * 2.5)
    endless = estimate(work=work, copies=Copies())
    found = speed(step_time(endless, FOUR, hardware), endless, FOUR, hardware)
    assert found is not None
    assert (found.hours, found.cost) == (None, None)
    unknown = Hardware(rates=rates(peers=1.0))
    assert speed(step_time(told, FOUR, unknown), told, FOUR, unknown) is None


def test_groups_share_what_a_node_sends() -> None:
    site = Topology(ranks=16, local_ranks=8, device="cuda")
    # Groups: each node; neighbours on a node; one ring; four with two ranks of each node; each rank
    # of a node with one of the other.
    cases = {(8, 1): 0.0, (2, 4): 0.0, (16, 1): 7.5, (4, 4): 4 * 6.0, (2, 8): 8 * 4.0}
    for (size, apart), seconds in cases.items():
        told = estimate(traffic("all-gather", 80, size, apart))
        parts = step_time(told, site, Hardware(rates=rates(network=10.0))).parts
        assert parts.get("network between nodes", 0) == pytest.approx(seconds)
    # No link sends more to another node than its rank sends to its neighbours.
    parts = step_time(told, site, Hardware(rates=rates(network=10.0, peers=1.0))).parts
    assert parts["network between nodes"] == 40.0
    unknown = step_time(told, site, Hardware(rates=rates(peers=1.0))).unknown
    assert "network between nodes" in unknown


def test_what_leaves_a_node_in_an_all_to_all() -> None:
    """Each of 8 ranks on nodes of 4 sends half of its tensors to the other node."""
    two = Topology(ranks=8, local_ranks=4, device="cuda")
    assert leaving(traffic("all-to-all", 80, 8), two) == 4 * 40
    assert leaving(traffic("all-reduce", 80, 8), two) == sent(traffic("all-reduce", 80, 8))
    assert leaving(traffic("all-to-all", 80, 4), two) == 0


def test_computation_waits_for_what_a_divided_model_exchanges() -> None:
    hardware = Hardware(rates=rates(measured=True, flops=100.0, bandwidth=70.0, peers=25.0))
    work = Work(products=300.0, attention=0.0, again=100.0, moved=70.0)
    hidden = estimate(traffic("all-gather", 100, 4), work=work, copies=Copies())
    inside = replace(traffic("all-gather", 100, 4), waits=True)
    waiting = estimate(inside, work=work, copies=Copies())
    assert step_time(hidden, FOUR, hardware).expected == pytest.approx(4 + 1 + 0.2 * 3)
    assert step_time(waiting, FOUR, hardware).expected == pytest.approx(4 + 1 + 3)
    staged = estimate(inside, work=replace(work, idle=0.25), copies=Copies())
    assert step_time(staged, FOUR, hardware).expected == pytest.approx(8 / 0.75)
    assert step_time(staged, FOUR, hardware).least == pytest.approx(4 / 0.75)

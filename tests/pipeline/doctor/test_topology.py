"""The table of `nvidia-smi topo -m`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path

import pytest

from pipeline.doctor.inventory import parse_topology
from pipeline.doctor.report import Link, Topology

RECORDED = Path(__file__).parent / "topologies"


def recorded(name: str, numbers: Collection[int] = range(8)) -> Topology:
    return parse_topology((RECORDED / f"{name}.txt").read_text(), numbers)


@pytest.mark.parametrize(
    ("name", "kinds", "numa"),
    [
        ("nvswitch", {"NV18": 28}, {f"GPU{i}": str(i // 4) for i in range(8)}),
        ("nvlink_pairs", {"NV4": 2, "SYS": 4}, {f"GPU{i}": str(i // 2) for i in range(4)}),
        ("pcie", {"PIX": 1, "PXB": 1, "PHB": 1, "NODE": 3}, {}),
        ("one", {}, {"GPU0": "0"}),
        ("pasted", {"SYS": 1}, {"GPU0": "0", "GPU1": "1"}),
    ],
)
def test_machines(name: str, kinds: dict[str, int], numa: dict[str, str]) -> None:
    topology = recorded(name)
    assert Counter(link.kind for link in topology.links) == kinds
    assert topology.numa == numa


def test_pairs_are_told_once_and_as_they_are() -> None:
    assert recorded("pcie").links == (
        Link(a="GPU0", b="GPU1", kind="PIX"),
        Link(a="GPU0", b="GPU2", kind="PHB"),
        Link(a="GPU0", b="GPU3", kind="NODE"),
        Link(a="GPU1", b="GPU2", kind="NODE"),
        Link(a="GPU1", b="GPU3", kind="NODE"),
        Link(a="GPU2", b="GPU3", kind="PXB"),
    )


@pytest.mark.parametrize("text", ["", "NVIDIA-SMI has failed", "GPU0\t X \t0-3\n"])
def test_no_table(text: str) -> None:
    assert parse_topology(text, range(8)) == Topology()


def test_nvlinks() -> None:
    kinds = ("NV1", "NV18", "NODE", "SYS", "PIX")
    found = [Link(a="GPU0", b="GPU1", kind=kind).is_nvlink for kind in kinds]
    assert found == [True, True, False, False, False]


def test_gpus_that_are_not_seen_are_left_out() -> None:
    pairs = recorded("nvlink_pairs", [3, 2])
    assert pairs.links == (Link(a="GPU2", b="GPU3", kind="NV4"),)
    assert pairs.numa == {"GPU2": "1", "GPU3": "1"}
    assert recorded("nvlink_pairs", []) == Topology()

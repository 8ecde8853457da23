"""What is found out before anything is measured."""

from __future__ import annotations

import os

import pytest

from pipeline.doctor.examine import _load, _topology
from pipeline.doctor.report import Link, Topology


@pytest.mark.parametrize(("average", "load"), [(9.0, 0.5), (0.3, 0.0), (33.0, 2.0)])
def test_the_load_is_that_of_the_whole_machine(
    monkeypatch: pytest.MonkeyPatch, average: float, load: float
) -> None:
    """A container or a job has few of its cores, and sees the processes on all."""
    monkeypatch.setattr(os, "getloadavg", lambda: (average, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    assert _load() == load


def test_gpus_that_are_not_seen_are_left_out() -> None:
    """Numbers are text where JSON has them as keys."""
    found = {"links": [[2, 3, "NV4"], [0, 3, "SYS"]], "numa_nodes": {"0": 0, "2": 1, "3": 1}}
    seen = _topology(found, {3, 2, None})
    assert seen.links == (Link(a="GPU2", b="GPU3", kind="NV4"),)
    assert seen.numa == {"GPU2": "1", "GPU3": "1"}
    assert _topology({}, {0}) == Topology()


def test_nvlinks() -> None:
    kinds = ("NV1", "NV18", "NODE", "SYS", "PIX")
    found = [Link(a="GPU0", b="GPU1", kind=kind).is_nvlink for kind in kinds]
    assert found == [True, True, False, False, False]

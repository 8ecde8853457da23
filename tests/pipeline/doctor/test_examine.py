"""What is found out before anything is measured."""

from __future__ import annotations

import os

import pytest

from pipeline.doctor.examine import _load


@pytest.mark.parametrize(("average", "load"), [(9.0, 0.5), (0.3, 0.0), (33.0, 2.0)])
def test_the_load_is_that_of_the_whole_machine(
    monkeypatch: pytest.MonkeyPatch, average: float, load: float
) -> None:
    """A container or a job has few of its cores, and sees the processes on all."""
    monkeypatch.setattr(os, "getloadavg", lambda: (average, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    assert _load() == load

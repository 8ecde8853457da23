"""Profiles: their peaks for any number of samples, and their cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memories.cases import Case, llama, own

from pipeline.planning import profile_cache as profiles
from pipeline.planning.planner import Job
from pipeline.planning.profile import Line, Peak, fullest
from pipeline.planning.profile_cache import profile_of

CASE = Case(name="llama", model=own(**llama()), length=256, ranks=2)


def job(case: Case, folder: Path) -> Job:
    return Job.of(case.plan(folder), case.topology())


lines = st.builds(Line, st.integers(-100, 1000), st.integers(0, 1000))
peaks = st.lists(st.builds(Peak, lines, st.integers(0, 50), st.integers(0, 50)), max_size=12)


@given(peaks, st.integers(1, 50), st.integers(0, 4), st.integers(0, 4))
def test_the_fullest_moments_are_enough(
    moments: list[Peak], samples: int, kept: int, passing: int
) -> None:
    def most(some: Any) -> int:
        sizes = (one.bytes.at(samples) + kept * one.arrived + passing * one.newest for one in some)
        return max(sizes, default=0)

    assert most(fullest(moments)) == most(moments)


def test_a_profile_is_kept_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPE_PROFILES", str(tmp_path / "not" / "there"))
    monkeypatch.setattr(profiles, "_made", {})
    here = job(CASE, tmp_path)
    made = profile_of(here)
    (kept,) = (tmp_path / "not" / "there").iterdir()
    assert kept.stat().st_mode & 0o77 == 0
    # A damaged profile is made again.
    whole = kept.read_bytes()
    for damaged in (b"", b"{}", b"\xff", whole[:-9]):
        kept.write_bytes(damaged)
        monkeypatch.setattr(profiles, "_made", {})
        assert profile_of(here) == made
    assert kept.read_bytes() == whole
    monkeypatch.setattr(profiles, "_made", {})
    monkeypatch.setattr("pipeline.planning.trace.profiling.profile", None)
    assert profile_of(here) == made
    # Fields that decide how samples are cut, or what is saved, do not change a model's parts.
    others = (replace(CASE, samples=4, ranks=8, wrap="ddp"), replace(CASE, accumulation=3))
    assert [profile_of(job(case, tmp_path)) for case in others] == [made, made]
    for case in (replace(CASE, length=128), replace(CASE, compute="fp32"), replace(CASE, chunk=64)):
        with pytest.raises(TypeError, match="NoneType"):
            profile_of(job(case, tmp_path))

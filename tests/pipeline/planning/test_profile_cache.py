"""Profiles on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from memories.cases import Case, llama, own

from pipeline.planning import profile_cache as profiles
from pipeline.planning.planner import Job
from pipeline.planning.profile_cache import profile_of

CASE = Case(name="llama", model=own(**llama()), length=256, ranks=2)


def job(case: Case, folder: Path) -> Job:
    return Job.of(case.plan(folder), case.topology())


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

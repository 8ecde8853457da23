"""Reports of ranks that fail."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from pipeline.checkpoint.store import LocalStore
from pipeline.checkpoint.writer_main import carry_out
from tests.support.tiny_store import Tiny, digests, job, read_digests


def test_files_of_a_rank_that_cannot_tell_whether_its_report_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 sees the report and commits, so the files that it speaks of must stay."""
    tiny, real, reports = Tiny(str(tmp_path)), LocalStore.put, []

    def put(store: LocalStore, name: str, file: str, data: bytes) -> None:
        if not file.endswith(".report"):
            return real(store, name, file, data)
        if not reports:
            real(store, name, file, data)
        reports.append(file)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(LocalStore, "put", put)
    assert carry_out(tiny.setups[1], job(1, "x"), tiny.arena(1, 1)).problem
    assert carry_out(tiny.setups[0], job(1, "x"), tiny.arena(0, 1)).problem == ""
    assert len(reports) == 2
    assert read_digests(LocalStore(tmp_path), "step-00000001") == digests(1)

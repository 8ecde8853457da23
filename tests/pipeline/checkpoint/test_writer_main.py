"""The process that writes a rank's part."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.checkpoint.local_store import LocalStore
from pipeline.checkpoint.store import Transaction, step_name
from tests.support.tiny_store import Tiny, digests, read_digests, write


def test_a_report_that_fails_once_it_was_seen_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 commits when it sees the last report, whose writer may fail to sync it."""
    put = Transaction.put

    def seen_and_failed(transaction: Transaction, file: str, data: bytes) -> None:
        put(transaction, file, data)
        if file.endswith(".report"):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(Transaction, "put", seen_and_failed)
    assert write(Tiny(str(tmp_path)), 3).problem == ""
    assert read_digests(LocalStore(tmp_path), step_name(3)) == digests(3)

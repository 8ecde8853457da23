"""Checkpoints in a folder of a file system."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.checkpoint.local_store import LocalStore

NAME = "step-00000001"


def test_a_report_may_start_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 commits when it sees the last report, whose writer has yet to sync the folder."""
    store = LocalStore(tmp_path)
    transaction = store.begin(NAME, "one")
    rename = Path.rename

    def renamed(path: Path, target: Path) -> Path:
        moved = rename(path, target)
        if path.name == "report.partial":
            store.commit(transaction, b"{}")
        return moved

    monkeypatch.setattr(Path, "rename", renamed)
    transaction.put("report", b"whole")
    assert store.get(NAME, "report") == b"whole"
    assert store.names() == [NAME]

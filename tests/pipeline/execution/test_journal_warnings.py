"""Warnings of a run in its journal."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from pipeline.execution import journal as journals
from pipeline.execution.journal import Journal, warnings_in
from pipeline.utils import terminal


@pytest.fixture
def log() -> logging.Logger:
    return logging.Logger("test")


def texts(journal: Journal) -> list[str]:
    return [event["text"] for event in journal.events() if event["event"] == "warning"]


def test_each_text_once(tmp_path: Path, log: logging.Logger) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    with warnings_in(journal, log):
        for number in (1, 2, 1):
            log.warning("dropped %d", number)
        log.info("no warning")
        log.error("a failure has an event of its own")
    log.warning("behind the run")
    assert texts(journal) == ["dropped 1", "dropped 2"]


def test_nothing_secret_is_journalled(
    tmp_path: Path, log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "_hidden", {"Zx9-33Qf7.kk": "$SOME_TOKEN"})
    journal = Journal(tmp_path / "journal.jsonl")
    with warnings_in(journal, log):
        log.warning("cannot reach https://user:word@host/ with Zx9-33Qf7.kk\x1b[2J")
    (text,) = texts(journal)
    assert "Zx9" not in text
    assert "word" not in text
    assert "\x1b" not in text


def test_a_start_journals_a_limited_number(
    tmp_path: Path, log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.setattr(journals, "LONGEST_WARNING", 9)
    journal = Journal(tmp_path / "journal.jsonl")
    with warnings_in(journal, log):
        for number in range(150):
            log.warning("%05d and more", number)
        log.warning("00007 and more")  # which is journalled
    *kept, last = texts(journal)
    assert kept == [f"{number:05d} and" for number in range(journals.MOST_WARNINGS)]
    assert last == "the log has 50 more warnings of this start"


def test_threads_and_the_run_s_own_events(
    tmp_path: Path, log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    journal = Journal(tmp_path / "journal.jsonl")

    def warn(first: int) -> None:
        for number in range(first, first + 20):
            log.warning("%d", number)

    with warnings_in(journal, log):
        threads = [threading.Thread(target=warn, args=(first,)) for first in (0, 20)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            journal.write("other")
        for thread in threads:
            thread.join()
    assert sorted(map(int, texts(journal))) == [*range(40)]  # no line is damaged
    assert len(journal.events()) == 60


def test_a_journal_that_cannot_be_written_ends_nothing(log: logging.Logger) -> None:
    with warnings_in(Journal(Path("/proc/none/journal.jsonl")), log):
        log.warning("x")

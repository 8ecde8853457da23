"""The events of a run: after crashes and damage, in a run that was moved, and its warnings."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import JournalDamaged
from pipeline.execution import journal as journals
from pipeline.execution.journal import Journal, warnings_in
from pipeline.utils import terminal


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.jsonl")


def test_finished_running_and_end(journal: Journal) -> None:
    assert (journal.state().finished, journal.state().slot) == ({}, None)
    assert not journal.state().ended_well
    journal.write("run started")
    journal.write("slot started", slot="a")
    journal.write("slot finished", slot="a", digest="1", record=None)
    journal.write("slot started", slot="b")
    assert journal.state().slot == "b"
    journal.write("run failed", problem="no")
    journal.write("run started")
    assert journal.state().slot is None
    journal.write("slot started", slot="a")
    journal.write("slot finished", slot="a", digest="2", record={"path": "x"})
    assert not journal.state().ended_well
    journal.write("run finished")
    assert journal.state().ended_well
    assert {slot: (f.digest, f.record) for slot, f in journal.state().finished.items()} == {
        "a": ("2", {"path": "x"})
    }


def a_journal(folder: Path) -> Journal:
    """Return the journal of a run that trained and exported."""
    journal = Journal(folder / "journal.jsonl")
    journal.write("run started", procs=2)
    for slot, digest, record in (
        ("model", "1", None),
        ("train", "2", {"checkpoint": str(folder / "checkpoints" / "step-00000004"), "step": 4}),
        ("export", "3", {"folder": "/elsewhere/export", "files": ["a", str(folder)]}),
    ):
        journal.write("slot started", slot=slot)
        journal.write("slot finished", slot=slot, digest=digest, record=record)
    journal.write("run finished")
    return journal


def old(events: list[dict[str, Any]]) -> bytes:
    """Return lines as versions without checksums wrote them."""
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def told(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events without unknown fields, such as a checksum whose name was changed."""
    names = ("time", "event", "slot", "digest", "record", "procs", "problem")
    return [{name: event[name] for name in names if name in event} for event in events]


def test_every_byte_that_is_another_is_noticed(tmp_path: Path) -> None:
    journal = a_journal(tmp_path)
    whole, events = journal.path.read_bytes(), journal.events()
    ends = [place for place, byte in enumerate(whole) if byte == ord("\n")]
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        journal.path.write_bytes(damaged)
        with pytest.raises(JournalDamaged, match=" is not as it was written ") as caught:
            journal.events()
        said = str(caught.value).partition(" is not ")[0]
        first, *rest = [int(word) for word in re.findall(r" (\d+)", said.rpartition(": ")[2])]
        last = rest[0] if rest else first
        # a different line end makes one line of two
        assert first <= sum(end < place for end in ends) + 1 <= last
    journal.path.write_bytes(whole)
    assert journal.events() == events


def test_a_journal_of_one_line_keeps_it_or_is_an_error(journal: Journal) -> None:
    journal.write("run started", procs=2)
    whole, events = journal.path.read_bytes(), told(journal.events())
    for place in range(len(whole)):
        journal.path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with contextlib.suppress(JournalDamaged):
            assert told(journal.events()) == events


def test_damage_names_file_line_and_the_way_on(tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    folder.mkdir()
    journal = a_journal(folder)
    lines = journal.path.read_bytes().splitlines(keepends=True)
    lines[4] = lines[4].replace(b"step-00000004", b"step-00000005")
    journal.path.write_bytes(b"".join(lines))
    with pytest.raises(JournalDamaged) as caught:
        journal.events()
    assert str(caught.value) == (
        f"{journal.path}: line 5 is not as it was written (to continue from the lines before it: "
        f"head -n 4 '{journal.path}' > '{journal.path}.whole' && mv '{journal.path}.whole' "
        f"'{journal.path}'; what finished later runs again, training from its newest checkpoint)"
    )
    journal.path.write_bytes(b"".join(lines[:4]))  # as `head` does
    assert [event["event"] for event in journal.events()][-1] == "slot started"
    journal.write("run started")
    assert len(journal.events()) == 5


def test_a_cut_loses_the_last_lines_only(tmp_path: Path) -> None:
    journal = a_journal(tmp_path)
    whole, events = journal.path.read_bytes(), journal.events()
    ends = [place for place, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(1, 400):
        journal.path.write_bytes(whole[:-cut])
        kept = events[: sum(end <= len(whole) - cut for end in ends)]
        assert journal.events() == kept
        journal.write("run started")
        assert journal.events()[:-1] == kept
        assert journal.events()[-1]["event"] == "run started"


@pytest.mark.parametrize(("order", "damaged"), [([0, 1, 3, 4], 3), ([0, 2, 1, 3, 4], 2)])
def test_a_line_that_is_gone_or_moved_is_noticed(
    order: list[int], damaged: int, tmp_path: Path
) -> None:
    journal = a_journal(tmp_path)
    lines = journal.path.read_bytes().splitlines(keepends=True)
    journal.path.write_bytes(b"".join(lines[number] for number in order))
    with pytest.raises(JournalDamaged, match=f"line {damaged} is not"):
        journal.events()


def test_an_old_journal_is_read_and_gone_on_with(journal: Journal, tmp_path: Path) -> None:
    export = str(tmp_path / "export")
    before = [
        {"time": 1.0, "event": "run started"},
        {"time": 2.0, "event": "slot started", "slot": "export"},
        {"time": 3.0, "event": "slot finished", "slot": "export", "digest": "1",
         "record": {"folder": export}},
    ]  # fmt: skip
    torn = b'{"time": 2.5, "event": "slot fin\n'  # ended by the run that continued after a crash
    journal.path.write_bytes(old(before[:2]) + torn + old(before[2:]))
    assert journal.events() == before
    journal.write("run finished")
    assert journal.state().ended_well
    assert journal.events()[:3] == before
    assert journal.state().finished["export"].record == {"folder": export}
    flipped = journal.path.read_bytes().replace(b'"export"', b'"expert"', 1)
    journal.path.write_bytes(flipped)
    with pytest.raises(JournalDamaged, match="one of lines 1 to 5 is not"):
        journal.events()


@pytest.mark.parametrize(
    "line",
    [
        b'{"time": 1, "event": "slot finished", "slot": "a", "digest": "1"}',
        b'{"time": 1, "event": "slot finished", "slot": "a", "digest": "1", "record": "x"}',
        b'{"time": 1, "event": "slot started", "slpt": "a"}',
        b'{"time": "1", "event": "run started"}',
        b'{"time": 1, "evenu": "run started"}',
        b"\xff\x00",
        b"[" * 100_000,
    ],
)
def test_an_old_line_that_makes_no_sense_is_damage(journal: Journal, line: bytes) -> None:
    journal.path.write_bytes(old([{"time": 1, "event": "run started"}]) + line + b"\n")
    with pytest.raises(JournalDamaged, match="line 2 is not"):
        journal.state()


def test_addresses_in_the_run_move_with_it(tmp_path: Path) -> None:
    first = tmp_path / "first"
    (first / "checkpoints" / "step-00000004").mkdir(parents=True)
    a_journal(first)
    second = first.rename(tmp_path / "second")
    assert str(first) not in (second / "journal.jsonl").read_text()
    found = Journal(second / "journal.jsonl").state().finished
    assert found["train"].record == {
        "checkpoint": str(second / "checkpoints" / "step-00000004"), "step": 4,
    }  # fmt: skip
    assert found["export"].record == {"folder": "/elsewhere/export", "files": ["a", str(second)]}


def test_a_journal_is_its_owners_and_is_not_written_through_a_link(tmp_path: Path) -> None:
    """A one-line file without a line end looks like a line that a crash cut short."""
    target = tmp_path / "token"
    target.write_text("secret")
    run = tmp_path / "run"
    run.mkdir()
    journal = Journal(run / "journal.jsonl")
    journal.path.symlink_to(target)
    with pytest.raises(OSError, match="nothing is written through links"):
        journal.write("run started")
    assert target.read_text() == "secret"
    journal.path.unlink()
    journal.write("run started")
    assert journal.path.stat().st_mode & 0o777 == 0o600


def test_a_sentence_that_begins_with_a_path_is_a_text(journal: Journal, tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    record = {"folder": str(tmp_path / "export"), "stopped": f"{tmp_path}/stop is there\x00"}
    journal.write("slot finished", slot="train", digest="1", record=record)
    written = json.loads(journal.path.read_text())["record"]
    assert written == {"folder": {"in run": "export"}, "stopped": record["stopped"]}
    assert journal.state().finished["train"].record == record


@pytest.fixture
def log() -> logging.Logger:
    return logging.Logger("test")


def texts(journal: Journal) -> list[str]:
    return [event["text"] for event in journal.events() if event["event"] == "warning"]


def test_each_warning_once(journal: Journal, log: logging.Logger) -> None:
    with warnings_in(journal, log):
        for number in (1, 2, 1):
            log.warning("dropped %d", number)
        log.info("no warning")
        log.error("a failure has an event of its own")
    log.warning("behind the run")
    assert texts(journal) == ["dropped 1", "dropped 2"]


def test_nothing_secret_is_journalled(
    journal: Journal, log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "_hidden", {"Zx9-33Qf7.kk": "$SOME_TOKEN"})
    with warnings_in(journal, log):
        log.warning("cannot reach https://user:word@host/ with Zx9-33Qf7.kk\x1b[2J")
    (text,) = texts(journal)
    assert "Zx9" not in text
    assert "word" not in text
    assert "\x1b" not in text


def test_a_start_journals_a_limited_number(
    journal: Journal, log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "LONGEST_WARNING", 9)
    with warnings_in(journal, log):
        for number in range(150):
            log.warning("%05d and more", number)
        log.warning("00007 and more")  # which is journalled
    *kept, last = texts(journal)
    assert kept == [f"{number:05d} and" for number in range(journals.MOST_WARNINGS)]
    assert last == "the log has 50 more warnings of this start"


def test_threads_and_the_run_s_own_events(journal: Journal, log: logging.Logger) -> None:
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

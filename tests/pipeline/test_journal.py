"""The journal, and the files of lines under it, after crashes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import jsonl
from pipeline.journal import Journal

RECORDS = st.lists(
    st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=9), max_size=3),
    min_size=1,
    max_size=5,
)


@given(records=RECORDS, more=RECORDS, cut=st.integers(1, 60))
def test_a_cut_spoils_whole_records_only(
    tmp_path_factory: pytest.TempPathFactory,
    records: list[dict[str, object]],
    more: list[dict[str, object]],
    cut: int,
) -> None:
    path = tmp_path_factory.mktemp("cut") / "file.jsonl"
    for record in records:
        jsonl.append(path, record)
    whole = path.read_bytes()
    left = whole[: max(0, len(whole) - cut)]
    path.write_bytes(left)
    # a record survives if its last brace does; the line end after it may be missing
    kept = [r for i, r in enumerate(records) if _end(whole, i) <= len(left)]
    assert list(jsonl.read(path)) == kept
    for record in more:
        jsonl.append(path, record, sync=True)
    assert list(jsonl.read(path)) == kept + more
    assert jsonl.read_tail(path) == kept + more


def _end(whole: bytes, index: int) -> int:
    """Offset behind the last brace of the record at `index`."""
    return sum(len(line) + 1 for line in whole.split(b"\n")[: index + 1]) - 1


def test_garbage_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(b'\x00\x00\x00\n\xff\xfe{}\n[1]\n"text"\n{"a": 1}\n')
    assert list(jsonl.read(path)) == [{"a": 1}]


def test_a_tail_starts_at_a_whole_record(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_text("".join(f'{{"step": {step}, "pad": "{"x" * 80}"}}\n' for step in range(2000)))
    steps = [record["step"] for record in jsonl.read_tail(path)]
    assert steps == list(range(steps[0], 2000))
    assert 500 < len(steps) < 800
    assert jsonl.read_tail(tmp_path / "none") == []
    assert list(jsonl.read(tmp_path / "none")) == []


def test_finished_running_and_end(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    assert journal.finished() == {}
    assert journal.running() is None
    assert not journal.ended_well()
    journal.write("run started")
    journal.write("slot started", slot="a")
    journal.write("slot finished", slot="a", digest="1", record=None)
    journal.write("slot started", slot="b")
    assert journal.running() == "b"
    journal.write("run failed", problem="no")
    journal.write("run started")
    assert journal.running() is None
    journal.write("slot started", slot="a")
    journal.write("slot finished", slot="a", digest="2", record={"path": "x"})
    assert not journal.ended_well()
    journal.write("run finished")
    assert journal.ended_well()
    assert {slot: (f.digest, f.record) for slot, f in journal.finished().items()} == {
        "a": ("2", {"path": "x"})
    }

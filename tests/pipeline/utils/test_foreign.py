"""Files of lines: after crashes, and followed as they grow, end in mid-line, and are replaced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.utils.files import replace_text
from pipeline.utils.foreign import Tail, append_line, read_lines, read_tail


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_disks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    tail = Tail(file)
    assert tail.read() == []
    file.write_text('{"a": 1}\n')
    assert tail.read() == [{"a": 1}]
    assert tail.read() == []
    with file.open("a") as more:
        more.write('{"a": 2}\nno JSON\n[3]\n{"a": 4')
    assert tail.read() == [{"a": 2}]
    with file.open("a") as more:
        more.write("}\n")
    assert tail.read() == [{"a": 4}]


def test_a_file_in_its_place_is_read_from_its_start(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    tail = Tail(file)
    replace_text(file, '{"a": 1}\n{"a": 2}\n')
    assert tail.read() == [{"a": 1}, {"a": 2}]
    assert not tail.replaced
    replace_text(file, '{"a": 1}\n{"b": 2}\n{"b": 3}\n')
    assert tail.read() == [{"a": 1}, {"b": 2}, {"b": 3}]
    assert tail.replaced
    assert tail.read() == []
    assert not tail.replaced


def test_of_a_long_file_only_the_end_is_read(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_text("".join(f'{{"a": {n}}}\n' for n in range(100)))
    assert Tail(file, newest_bytes=20).read() == [{"a": 98}, {"a": 99}]


@given(st.lists(st.integers(), min_size=1), st.lists(st.integers(1, 7)))
def test_however_it_is_cut_each_record_comes_once(values: list[int], cuts: list[int]) -> None:
    import tempfile

    data = "".join(json.dumps({"a": value}) + "\n" for value in values).encode()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lines"
        tail, found, at = Tail(file), [], 0
        for cut in [*cuts, len(data)]:
            with file.open("ab") as more:
                more.write(data[at : at + cut])
            at += cut
            found += tail.read()
    assert found == [{"a": value} for value in values]


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
        append_line(path, record)
    whole = path.read_bytes()
    left = whole[: max(0, len(whole) - cut)]
    path.write_bytes(left)
    # a record survives if its last brace does; the line end after it may be missing
    ends = [at for at, byte in enumerate(whole) if byte == ord("\n")]
    kept = [record for record, end in zip(records, ends, strict=True) if end <= len(left)]
    assert list(read_lines(path)) == kept
    for record in more:
        append_line(path, record, sync=True)
    assert list(read_lines(path)) == kept + more
    assert read_tail(path) == kept + more


def test_garbage_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(b'\x00\x00\x00\n\xff\xfe{}\n[1]\n"text"\n{"a": 1}\n')
    assert list(read_lines(path)) == [{"a": 1}]


def test_a_tail_starts_at_a_whole_record(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_text("".join(f'{{"step": {step}, "pad": "{"x" * 80}"}}\n' for step in range(2000)))
    steps = [record["step"] for record in read_tail(path)]
    assert steps == list(range(steps[0], 2000))
    assert 500 < len(steps) < 800
    assert read_tail(tmp_path / "none") == []
    assert list(read_lines(tmp_path / "none")) == []

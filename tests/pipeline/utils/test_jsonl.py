"""Following a file that grows, ends in mid-line, and is replaced."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pipeline.utils.files import replace_text
from pipeline.utils.jsonl import Tail


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

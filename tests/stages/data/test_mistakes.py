"""Rows with mistakes are collected, and reported or dropped together."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import escape

from pipeline import BadRows, Context, DataError, cli
from pipeline.view.run import History
from pipeline.view.run_report import timeline
from stages.data import mistakes
from stages.data.mistakes import kind_of
from stages.data.stages import ChatSource, StreamData, TextData
from tests.stages.data.conftest import Chats
from tests.stages.data.fakes import PLAIN, FakeSource, ids
from tests.support.pipe import Pipe
from tests.support.runs import TINY
from tests.support.tiny_project import tiny_project

USER, BOT = {"role": "user", "content": "A"}, {"role": "assistant", "content": "b"}
GOOD = json.dumps({"messages": [USER, BOT]})
USR = json.dumps({"messages": [{"role": "usr", "content": "x"}]})
BOOT = json.dumps({"messages": [USER, {"role": "boot", "content": "x"}]})
EMPTY = json.dumps({"messages": []})
TEXT = json.dumps({"text": "x"})
LINES = ['{"text": "abcdefgh"}', "{bad", '{"text": 3}', '{"body": "x"}', '{"text": "ijklmnop"}']


def test_all_mistakes_are_shown_at_once(chats: Chats) -> None:
    assert chats.error(GOOD, "{bad", USR, BOOT, EMPTY, TEXT, GOOD) == (
        "5 of 7 rows cannot be trained on:\n"
        "  a.jsonl:2: not JSON: Expecting property name enclosed in double quotes at column 2 "
        "(one JSON object a line; a .json file can also be one array of objects)\n"
        "  a.jsonl:3: `messages[0].role` is 'usr', which is not a known role (did you mean "
        "`user`?)\n"
        "  a.jsonl:4: `messages[1].role` is 'boot', which is not a known role (known here: system, "
        "developer, user, assistant, tool)\n"
        "  a.jsonl:5: `messages` is not a list of messages, or an empty one\n"
        "  a.jsonl:6: a row of form 'text' in a file of 'messages' rows "
        "(keep each form in separate files, and name them in `sources`)\n"
        "by kind:\n"
        "  2 rows: `messages[…].role` is '…', which is not a known role\n"
        "  1 row: not JSON: Expecting property name enclosed in double quotes at column 2"
        "\n"
        "  1 row: a row of form 'text' in a file of 'messages' rows\n"
        "  1 row: `messages` is not a list of messages, or an empty one\n"
        "`bad_rows: drop` leaves such rows out"
    )
    assert not list((chats.folder / "cache").glob("*"))
    with pytest.raises(DataError) as caught:
        chats.run(GOOD, EMPTY)
    assert (Path(caught.value.file).name, caught.value.row) == ("a.jsonl", 2)


@pytest.mark.parametrize("workers", [1, 2])
def test_many_rows_are_counted_and_the_first_are_shown(chats: Chats, workers: int) -> None:
    with pytest.raises(BadRows) as caught:
        chats.run(*[USR if number % 3 else GOOD for number in range(600)], workers=workers)
    assert "400 of 600 rows cannot be trained on: the first 20:" in str(caught.value)
    expected = [number + 1 for number in range(600) if number % 3]
    assert [row.row for row in caught.value.rows] == expected[:20]
    assert list(caught.value.kinds.values()) == [400]


@pytest.mark.parametrize("line", ["{bad", USR, TEXT])
def test_reading_ends_where_all_is_wrong(
    chats: Chats, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mistakes, "MOST", 100)
    found = chats.error(GOOD, *[line] * 1000, workers=1)
    assert ", and reading ended after these: the first 20:" in found
    assert 100 <= int(found.partition(" of ")[0]) < 300


def test_sources_are_reported_together(chats: Chats) -> None:
    files = [(GOOD, USR), (GOOD,), (GOOD, EMPTY, "{")]
    sources = tuple(
        ChatSource(files=chats.stage(*lines, name=f"{number}.jsonl").files)
        for number, lines in enumerate(files)
    )
    found = chats.error(files=(), sources=sources[:2], heldout_sources=sources[2:])
    assert "0.jsonl:2: `messages[0].role` is 'usr'" in found
    assert "2 of 3 rows cannot be trained on" in found
    assert "2.jsonl:2: `messages` is not a list" in found


def test_dropped_rows_are_said_at_each_start(
    chats: Chats, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for start in range(2):
        caplog.clear()
        data = chats.run(GOOD, "{bad", USR, BOOT, GOOD, bad_rows="drop")
        assert len(data.train) == 2
        assert "5 rows (messages), 2 samples" in caplog.text
        assert "3 rows dropped" in caplog.text, start
        warned = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        assert warned == [
            "dropped 2 rows that cannot be trained on: `messages[…].role` is '…', which is not a "
            f"known role, the first: {tmp_path}/a.jsonl:3",
            "dropped 1 row that cannot be trained on: not JSON: Expecting property name enclosed "
            f"in double quotes at column 2, the first: {tmp_path}/a.jsonl:2",
        ]
    moved = (tmp_path / "a.jsonl").rename(tmp_path / "b.jsonl")  # the same content: no new tokens
    caplog.clear()
    chats.run(files=str(moved), bad_rows="drop")
    assert f"the first: {moved}:3" in caplog.text
    assert "3 of 5 rows" in chats.error(files=str(moved))


def test_ids_that_another_vocabulary_has(chats: Chats, source: FakeSource) -> None:
    rows, prints = [{"input_ids": [1, last]} for last in (2, 300, 280)], set()
    for size, kept in [(259, [2]), (301, [2, 300, 280]), (290, [2, 280]), (259, [2])]:
        source.rows = size
        data = chats.run(*rows, source=source, bad_rows="drop")
        found = [data.train[index].labels.tolist() for index in range(len(data.train))]
        assert found == [[last] for last in kept]
        prints.add(data.fingerprint)
    assert len(prints) == 3
    source.rows = 310  # the same rows
    assert chats.run(*rows, source=source, bad_rows="drop").fingerprint in prints


def test_rows_without_mistakes_are_the_same_data_under_either(chats: Chats) -> None:
    """`drop` does not keep a run from being resumed, unless it drops something."""
    either = [chats.run(GOOD, GOOD, bad_rows=each) for each in ("error", "drop")]
    assert either[0].identity == either[1].identity
    dropped = chats.run(GOOD, GOOD, USR, bad_rows="drop")
    assert dropped.train[1].input_ids.tolist() == either[0].train[1].input_ids.tolist()
    assert dropped.fingerprint != either[0].fingerprint


def test_treatments_matter_where_rows_are_treated(
    chats: Chats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that an earlier version began, which trained such rows as `allow` and `train` do, goes
    on under these."""
    fields = [{}, *({"unrendered": each} for each in ("drop", "allow")),
              *({"empty": each} for each in ("error", "drop"))]  # fmt: skip
    plain = [chats.run(GOOD, **each) for each in fields]
    assert all(data.identity == plain[0].identity for data in plain)
    thinks = {"messages": [USER, {**BOT, "thinking": "why"}]}
    silent = {"messages": [USER, {**BOT, "content": ""}]}
    prints = [
        chats.run(GOOD, thinks, silent, unrendered=unrendered, empty=empty).identity
        for unrendered in ("allow", "drop")
        for empty in ("train", "drop")
    ]
    assert len({str(each) for each in prints}) == 4
    monkeypatch.setattr("stages.data.turns.Turns.lost", lambda *given: [])
    before = chats.run(cache=str(chats.folder / "other"))
    assert before.identity == prints[0]


def test_a_damaged_file_is_no_row(chats: Chats, tmp_path: Path) -> None:
    cut = gzip.compress(f"{GOOD}\n{USR}\n".encode() * 9)[:-9]
    (tmp_path / "z.jsonl.gz").write_bytes(cut)
    files = (str(tmp_path / "z.jsonl.gz"), str(tmp_path / "a.jsonl"))
    both = {each: chats.error(USR, files=files, bad_rows=each) for each in ("error", "drop")}
    assert both["drop"].startswith("z.jsonl.gz:19: cannot be read: ")
    assert "z.jsonl.gz:19: cannot be read: " in both["error"]
    assert "a.jsonl:1: `messages[0].role` is 'usr'" in both["error"]


def test_lines_after_one_that_cannot_be_read(
    chats: Chats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.data.rows.LARGEST_LINE", 1 << 10)
    (tmp_path / "a.jsonl").write_bytes(
        b'{"x": "\xff"}\n' + b"x" * 5000 + b"\n\0\n" + GOOD.encode() + b"\n" + b"y" * 2000
    )
    assert len(chats.run(bad_rows="drop").train) == 1
    with pytest.raises(BadRows) as caught:
        chats.run()
    assert [row.row for row in caught.value.rows] == [1, 2, 3, 5]


def test_rows_of_tables(chats: Chats) -> None:
    rows = [[USER, BOT], [{"role": "usr", "content": "x"}], None, [USER, BOT]]
    given = [{"messages": row} for row in rows]
    assert len(chats.run(*given, name="a.parquet", bad_rows="drop").train) == 2
    found = chats.error(*given, name="a.parquet")
    assert "a.parquet:2: `messages[0].role` is 'usr'" in found
    assert "a.parquet:3: fits no form; it has nothing (a row has one of" in found


def test_documents(
    ctx: Context, source: FakeSource, chats: Chats, caplog: pytest.LogCaptureFixture
) -> None:
    stage = chats.stage(*LINES)
    fields: Any = {"files": stage.files, "cache": stage.cache}
    with pytest.raises(BadRows) as caught:
        TextData(**fields).run(ctx, source)
    found = str(caught.value).replace(f"{chats.folder}/", "")
    assert found.startswith("3 of 5 rows cannot be trained on:\n  a.jsonl:2: not JSON")
    assert "  a.jsonl:4: no key 'text'; it has ['body'] (set `text_key`)\n" in found
    data = TextData(**fields, bad_rows="drop", append_eos=False).run(ctx, source)
    assert data.train[0].input_ids.tolist() == ids("abcdefghijklmno")
    assert "dropped 1 row that cannot be trained on: 'text' is a number, not text" in caplog.text
    chats.stage(LINES[0], LINES[4])
    same = [TextData(**fields, bad_rows=each).run(ctx, source) for each in ("error", "drop")]
    assert same[0].fingerprint == same[1].fingerprint != data.fingerprint


def test_shards(
    ctx: Context, source: FakeSource, chats: Chats, caplog: pytest.LogCaptureFixture
) -> None:
    stage = chats.stage(*LINES)
    fields: Any = {
        "shards": stage.files, "cache": stage.cache, "sequence_length": 64, "append_eos": False,
    }  # fmt: skip
    stream = StreamData(**fields).run(ctx, source)
    with pytest.raises(BadRows, match="3 of 5 rows"):
        stream.train.order(0, shuffle=False).indices(0, 1)
    stream = StreamData(**fields, bad_rows="drop").run(ctx, source)
    index = int(stream.train.order(0, shuffle=False).indices(0, 1)[0])
    assert stream.train[index].input_ids.tolist() == ids("abcdefghijklmno")
    assert "stream: dropped 1 row that cannot be trained on: no key 'text'" in caplog.text


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.text("ab'\" ", max_size=8))
def test_mistakes_of_one_kind(first: int, second: int, text: str) -> None:
    kinds = {
        kind_of(f"the template's `messages[{number}].role` is {value!r}, {number:,} tokens")
        for number, value in ((first, "bot"), (second, text))
    }
    assert len(kinds) == 1
    assert kind_of(f"`messages[{first}].role` is 'x'") != kind_of(f"`tools[{first}].role` is 'x'")


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a call of `pipe check --data` on a recipe with some lines as its data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    FakeSource(PLAIN).fast.save_pretrained("tokenizer")
    model = {"use": "model.hf", "config": {**TINY, "vocab_size": 259}, "tokenizer": "./tokenizer"}
    data = {"use": "data.chat", "files": "./rows.jsonl", "sequence_length": 64}
    Path("r.yaml").write_text(json.dumps({"name": "r", "stages": {"model": model, "data": data}}))

    def run(*arguments: str, lines: list[str]) -> Result:
        Path("rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
        command = ["check", "r.yaml", "--data", *arguments]
        return CliRunner().invoke(cli.main, command, catch_exceptions=False)

    return run


def test_check_reads_all_rows(check: Any) -> None:
    good = check(lines=[GOOD, GOOD])
    assert (good.exit_code, good.stdout) == (
        0, "ok: r: 2 stages: model.hf -> data.chat\ndata: 2 samples to train on, 0 held out\n"
    )  # fmt: skip
    bad = check(lines=[GOOD, USR, EMPTY])
    assert (bad.exit_code, bad.stdout) == (2, "")
    assert "error: 2 of 3 rows cannot be trained on:\n" in bad.stderr
    assert "rows.jsonl:3: `messages` is not a list of messages, or an empty one\n" in bad.stderr
    one = check(lines=[GOOD, USR])
    assert (one.exit_code, one.stdout) == (2, "")
    dropped = check("data.bad_rows=drop", lines=[GOOD, USR])
    assert (dropped.exit_code, dropped.stdout.count("data: 1 sample")) == (0, 1)
    assert "warning: dropped 1 row that cannot be trained on: `messages[0].role`" in dropped.stderr
    none = check("data.bad_rows=drop", lines=[USR])
    assert (none.exit_code, "no token to train on in 1 row" in none.stderr) == (2, True)


def test_check_as_json(check: Any) -> None:
    bad = check("--json", lines=[GOOD, USR, BOOT])
    found = json.loads(bad.stdout)
    assert (bad.exit_code, found["ok"]) == (2, False)
    places = [(Path(one["file"]).name, one["line"], one["key"]) for one in found["problems"]]
    assert places == [("rows.jsonl", 2, "data"), ("rows.jsonl", 3, "data")]
    assert found["kinds"] == {"`messages[…].role` is '…', which is not a known role": 2}
    good = json.loads(check("--json", "data.bad_rows=drop", lines=[GOOD, USR]).stdout)
    assert good["ok"]
    assert good["data"]["samples"] == 1
    assert good["data"]["warnings"][0].startswith("dropped 1 row that cannot be trained on")


def test_check_of_a_stream_reads_its_first_window(check: Any) -> None:
    Path("r.yaml").write_text(
        Path("r.yaml").read_text().replace("chat", "stream").replace("files", "shards")
    )
    bad = check(lines=LINES)
    assert (bad.exit_code, "3 of 5 rows cannot be trained on" in bad.stderr) == (2, True)
    good = check("data.bad_rows=drop", lines=LINES)
    assert (good.exit_code, good.stdout.count("data: a stream of samples")) == (0, 1)
    assert "warning: stream: dropped 1 row" in good.stderr


def test_check_of_a_machine_that_fails(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = check("data.cache=/proc/none", lines=[GOOD])
    assert failed.exit_code == 1
    assert "cannot write the cache" in failed.stderr


def test_a_run_says_what_it_drops(tmp_path: Path) -> None:
    """On its screen, in its log and in its report."""
    recipe = tiny_project(tmp_path)
    (tmp_path / "bad.jsonl").write_text("\n".join(LINES * 40))
    done = Pipe(tmp_path, tmp_path)(
        "run", str(recipe), "data.files=./bad.jsonl", "data.bad_rows=drop", "launch.procs=1",
        "train.steps=1", "--run-dir", "run",
    )  # fmt: skip
    text = "dropped 40 rows that cannot be trained on: no key 'text'; it has ['body']"
    assert done.code == 0, done.stderr
    assert text in done.stdout
    run = tmp_path / "run"
    assert text in (run / "logs/rank-00000.log").read_text()
    (told,) = [mark.text for mark in timeline(History(run)) if text in mark.text]
    assert told.endswith(f", the first: {tmp_path}/bad.jsonl:4")
    assert str(escape(told)) in (run / "report.html").read_text()

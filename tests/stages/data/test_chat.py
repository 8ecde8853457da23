from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.contracts.data import NO_TARGET, Sample
from pipeline.contracts.stage import Context
from pipeline.errors import DataError, StageError
from pipeline.testing import plan_view
from stages.data.chat import ChatData
from stages.data.encode import Dropped, Encoded, RowEncoder
from stages.data.mistakes import Mistake
from stages.data.rendering import with_date
from tests.stages.data.fakes import MARKED, PLAIN, SPECIAL, FakeSource, ids
from tests.support.tier import examples, times

END, START, STOP = SPECIAL["<|end|>"], SPECIAL["<|s|>"], SPECIAL["<|e|>"]
_ = NO_TARGET


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


HELLO = [message("user", "A"), message("assistant", "b")]
TWO_TURNS = [*HELLO, message("user", "C"), message("assistant", "d")]


@pytest.fixture
def chat(tmp_path: Path) -> Any:
    """Return a call that writes rows to a file and makes a ChatData stage with its own cache."""

    def make(*rows: Any, **fields: Any) -> ChatData:
        path = tmp_path / "rows.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(lines), encoding="utf-8")
        return ChatData(files=str(path), **{"cache": str(tmp_path / "cache"), **fields})

    return make


def only(ctx: Context, source: FakeSource, stage: ChatData) -> Sample:
    data = stage.run(ctx, source)
    assert len(data.train) == 1
    sample = data.train[0]
    assert data.train.targets(0) == int((sample.labels != NO_TARGET).sum())
    return sample


def trained(sample: Sample) -> list[int]:
    return [int(label) for label in sample.labels if label != NO_TARGET]


def turn(role: str, content: str) -> list[int]:
    return [START, *ids(f"{role}\n{content}"), STOP, *ids("\n")]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_golden_tokens_and_mask(ctx: Context, chat: Any, template: str) -> None:
    sample = only(ctx, FakeSource(template), chat({"messages": HELLO}))
    user = [START, 84, 82, 68, 81, 198, 32, STOP, 198]
    assistant = [START, 64, 82, 82, 72, 82, 83, 64, 77, 83, 198, 65, STOP]
    assert sample.input_ids.tolist() == user + assistant
    assert sample.labels.tolist() == [_] * 19 + [65, STOP, _]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_all_turns_or_the_last(ctx: Context, chat: Any, template: str) -> None:
    source = FakeSource(template)
    both = only(ctx, source, chat({"messages": TWO_TURNS}))
    assert trained(both) == [*ids("b"), STOP, *ids("d"), STOP]
    last = only(ctx, source, chat({"messages": TWO_TURNS}, loss="last"))
    assert trained(last) == [*ids("d"), STOP]
    assert last.input_ids.tolist() == both.input_ids.tolist()


@settings(
    max_examples=times(quick=25, full=250),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    contents=st.lists(st.text(" ab\n\té🎉", max_size=6), min_size=2, max_size=6),
    marked=st.booleans(),
)
def test_targets_spell_what_the_assistant_said(
    ctx: Context, chat: Any, contents: list[str], marked: bool
) -> None:
    roles = ["user", "assistant"] * 3
    messages = [message(role, text) for role, text in zip(roles, contents, strict=False)]
    source = FakeSource(MARKED if marked else PLAIN)
    sample = only(ctx, source, chat({"messages": messages}))
    said = "".join(f"{m['content']}<|e|>" for m in messages if m["role"] == "assistant")
    assert source.fast.decode(trained(sample)) == said
    shown = source.fast.decode([*sample.input_ids.tolist(), *ids("\n")])
    assert shown == source.fast.apply_chat_template(messages, tokenize=False)


def test_system_tools_and_template_arguments(ctx: Context, chat: Any) -> None:
    template = "{{ tools[0].name }}{{ mood }}" + PLAIN
    row = {
        "id": 7,
        "tokenize": True,
        "tools": [{"name": "T"}],
        "chat_template_kwargs": {"mood": "M"},
        "messages": [message("system", "S"), *HELLO],
    }
    sample = only(ctx, FakeSource(template), chat(row))
    expected = [*ids("TM"), *turn("system", "S"), *turn("user", "A"), *turn("assistant", "b")]
    assert sample.input_ids.tolist() == expected[:-1]
    assert trained(sample) == [*ids("b"), STOP]


def test_an_assistant_message_may_hold_only_a_tool_call(ctx: Context, chat: Any) -> None:
    template = PLAIN.replace("{{ m.content }}", "{{ m.content or m.tool_calls[0].name }}")
    messages = [HELLO[0], {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    row = {"messages": messages, "tools": []}
    assert trained(only(ctx, FakeSource(template), chat(row))) == [
        *ids("f"),
        STOP,
    ]


def test_prompt_and_completion(ctx: Context, chat: Any) -> None:
    source = FakeSource()
    as_messages = only(ctx, source, chat({"messages": HELLO}))
    as_text = only(ctx, source, chat({"prompt": "A", "completion": "b"}))
    assert as_text.labels.tolist() == as_messages.labels.tolist()
    lists = only(ctx, source, chat({"prompt": TWO_TURNS[:3], "completion": TWO_TURNS[3:]}))
    assert trained(lists) == [*ids("d"), STOP]


def test_text_without_a_template(ctx: Context, chat: Any) -> None:
    stage = chat({"prompt": "ab ", "completion": " cd"}, template=False)
    sample = only(ctx, FakeSource(None), stage)
    assert sample.input_ids.tolist() == ids("ab  cd")
    assert sample.labels.tolist() == [_, _, *ids(" cd"), END]
    with pytest.raises(StageError, match=r"no chat template.*template: false"):
        dataclasses.replace(stage, template=True).run(ctx, FakeSource(None))


def test_too_long(
    ctx: Context, chat: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    source = FakeSource()
    long, behind = {"messages": TWO_TURNS}, {"messages": [message("user", "x" * 50), HELLO[1]]}
    with caplog.at_level(logging.INFO):
        data = chat(long, behind, sequence_length=22).run(ctx, source)
    assert re.search(
        r"rows\.jsonl: 2 rows \(messages\), 1 sample, 22 tokens, 2 trained on, 2 rows cut to 22 "
        r"tokens, 1 row dropped, \d\.\d s$",
        caplog.text,
        re.MULTILINE,
    )
    assert str(tmp_path) not in caplog.text.split("rows.jsonl:", 1)[1].splitlines()[0]
    assert len(data.train) == 1
    assert len(data.train[0].input_ids) == 21
    assert str(data.identity["rows_cut_to"]).startswith("sequence_length tokens")
    assert trained(data.train[0]) == [*ids("b"), STOP]
    assert "dropped 1 row whose trained tokens all come after `sequence_length`" in caplog.text
    assert "rows.jsonl:2" in caplog.text
    with pytest.raises(DataError, match=r"rows\.jsonl:1: 46 tokens, but `sequence_length` is 22"):
        chat(long, sequence_length=22, too_long="error").run(ctx, source)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        stage = chat(long, {"messages": HELLO}, sequence_length=30, too_long="drop")
        data = stage.run(ctx, source)
    assert "1 row dropped (1 longer than 30 tokens)" in caplog.text
    assert len(data.train) == 1
    assert trained(data.train[0]) == [*ids("b"), STOP]


@pytest.mark.parametrize("treatment", ["truncate", "drop", "error"])
@pytest.mark.parametrize("packing", [False, True])
def test_a_row_of_as_many_tokens_as_a_sample_may_have(
    ctx: Context, chat: Any, treatment: str, packing: bool
) -> None:
    stage = chat({"messages": TWO_TURNS}, too_long=treatment, packing=packing, sequence_length=46)
    data = stage.run(ctx, FakeSource())
    assert len(data.train[0].input_ids) == 45  # the last token is only predicted
    assert "rows_cut_to" not in data.identity  # as in earlier versions


def truncated(row: Encoded, length: int) -> Encoded | Dropped:
    stage = ChatData(files="unused", sequence_length=length)
    nothing: Any = None
    encoder = RowEncoder(
        fields=stage,
        names=stage.names(),
        tokens=nothing,
        vocab_size=99,
        start=[],
        dtype="<u2",
    )
    found = encoder._cut(nothing, row)
    assert not isinstance(found, Mistake)
    return found


@given(length=st.integers(2, 60), count=st.integers(2, 60))
@examples(30)
def test_a_row_is_cut_to_the_tokens_that_the_field_says(length: int, count: int) -> None:
    """TRL's `max_length` counts in the same way."""
    whole = Encoded(ids=np.arange(count), trained=np.ones(count, bool))
    found = truncated(whole, length)
    assert isinstance(found, Encoded)
    assert found.ids.tolist() == list(range(min(length, count)))
    assert found.long == found.kept_more == (count > length)


@pytest.mark.parametrize(
    ("tokens", "answer", "same"),
    [(9, 6, False), (10, 6, False), (10, 8, False), (10, 9, True), (8, 6, True)],
)
def test_rows_that_earlier_versions_treated_otherwise(tokens: int, answer: int, same: bool) -> None:
    """They kept rows of `sequence_length` + 1 tokens; one that is trained on from `answer` on."""
    row = Encoded(ids=np.arange(tokens), trained=np.arange(tokens) >= answer)
    assert truncated(row, 8).kept_more is not same


def test_the_first_of_many_dropped_rows_is_named(
    ctx: Context, chat: Any, caplog: pytest.LogCaptureFixture
) -> None:
    silent = {"messages": [message("user", "A")]}
    chat({"messages": HELLO}, *[silent] * 6).run(ctx, FakeSource())
    (told,) = [each for each in caplog.messages if each.startswith("dropped")]
    assert told.startswith("dropped 6 rows without a message of the assistant, the first: ")
    assert told.endswith("rows.jsonl:2")


def test_a_set_without_targets_is_refused(ctx: Context, chat: Any, tmp_path: Path) -> None:
    silent = {"messages": [message("user", "A"), message("user", "b")]}
    with pytest.raises(StageError) as caught:
        chat(silent, silent).run(ctx, FakeSource())
    assert str(caught.value) == (
        "no token to train on in 2 rows: 2 rows without a message of the assistant "
        "(check `loss`, the roles of the messages, the chat template and `sequence_length`)"
    )
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps(silent))
    with pytest.raises(StageError, match="no token to train on in 1 row: 1 row "):
        chat({"messages": HELLO}, heldout_files=str(held)).run(ctx, FakeSource())


def test_held_out_samples_are_the_last(ctx: Context, chat: Any) -> None:
    rows = [{"prompt": "A", "completion": letter} for letter in "bcdefgh"]
    data = chat(*rows, heldout_fraction=0.3).run(ctx, FakeSource())
    assert [chr(trained(s)[0] + 33) for s in map(data.train.__getitem__, range(5))] == list("bcdef")
    assert data.heldout is not None
    assert [trained(data.heldout[i])[0] for i in range(len(data.heldout))] == ids("gh")
    with pytest.raises(IndexError):
        data.train[5]


def test_the_cache_knows_the_template_and_the_settings(
    ctx: Context, chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = chat({"messages": TWO_TURNS})
    prints = [
        stage.run(ctx, FakeSource()).fingerprint,
        stage.run(ctx, FakeSource(MARKED)).fingerprint,
        dataclasses.replace(stage, loss="last").run(ctx, FakeSource()).fingerprint,
        dataclasses.replace(stage, sequence_length=30).run(ctx, FakeSource()).fingerprint,
    ]
    assert len(set(prints)) == 4

    def no_encoder(*arguments: Any) -> Any:
        raise AssertionError("tokenised again")

    monkeypatch.setattr("stages.data.encode.RowEncoder.batch", no_encoder)
    again = stage.run(ctx, FakeSource())
    assert again.fingerprint == prints[0]
    assert trained(again.train[0]) == [*ids("b"), STOP, *ids("d"), STOP]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_template_is_told_the_date_that_is_set(ctx: Context, chat: Any, template: str) -> None:
    source = FakeSource("\n  {{ strftime_now('%d %b %Y, 100%%d') }}" + template)
    stage = chat({"messages": HELLO})
    sample = only(ctx, source, stage)
    conversation = [*turn("user", "A"), *turn("assistant", "b")][:-1]
    assert sample.input_ids.tolist() == [*ids("\n  26 Jul 2024, 100%d"), *conversation]
    assert trained(sample) == [*ids("b"), STOP]
    other = dataclasses.replace(stage, today="2031-01-02")
    assert only(ctx, source, other).input_ids.tolist()[:14] == ids("\n  02 Jan 2031")
    assert other.run(ctx, source).fingerprint != stage.run(ctx, source).fingerprint


@pytest.mark.parametrize("bad", ["tomorrow", "2024-02-30", "20240726", "26 Jul 2024"])
def test_what_is_no_date(chat: Any, bad: str) -> None:
    (problem,) = chat(today=bad).check(plan_view())
    assert str(problem) == f"today: {bad!r} is not a date (write it as YYYY-MM-DD)"


@examples(25)
@given(
    before=st.text(" \n-x", max_size=4),
    date=st.datetimes(datetime.datetime(1970, 1, 1), datetime.datetime(2099, 1, 1)),
)
def test_the_template_renders_as_if_it_were_that_day(before: str, date: Any) -> None:
    asked = ["%d %b %Y", "%-d/%-m/%y %A", "100%% %%d %j", "%H:%M:%S %p %F"]
    template = before + "{% for m in messages %}{{ strftime_now(m.content) }};{% endfor %}"
    plain = template.replace("strftime_now(m.content)", "m.content")
    day = date.replace(hour=0, minute=0, second=0, microsecond=0)
    fast = FakeSource().fast

    def rendered(template: str, contents: list[str]) -> str:
        said = [message("user", content) for content in contents]
        return str(fast.apply_chat_template(said, chat_template=template, tokenize=False))

    told = rendered(with_date(template, f"{day:%Y-%m-%d}"), asked)
    assert told == rendered(plain, [day.strftime(each) for each in asked])


def test_parquet_rows(ctx: Context, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    table = pyarrow.table({"messages": [HELLO, TWO_TURNS], "source": ["x", "y"]})
    parquet.write_table(table, tmp_path / "a.parquet")
    stage = ChatData(files=str(tmp_path / "a.parquet"), cache=str(tmp_path / "cache"))
    data = stage.run(ctx, FakeSource())
    assert [trained(data.train[i]) for i in range(2)] == [
        [*ids("b"), STOP],
        [*ids("b"), STOP, *ids("d"), STOP],
    ]


def test_a_template_that_forgets_earlier_turns(ctx: Context, chat: Any) -> None:
    """Templates that show the reasoning of the last answer only do this."""
    template = PLAIN.replace("{{ m.content }}", "{{ 'R' if loop.last }}{{ m.content }}")
    stage = chat({"messages": TWO_TURNS})
    sample = only(ctx, FakeSource(template), stage)
    assert trained(sample) == [*ids("b"), STOP, *ids("Rd"), STOP]
    with pytest.raises(DataError, match=r"leaves out content of messages\[0\] and 3 more"):
        stage.run(ctx, FakeSource("{{ messages|length }}"))
    marked = MARKED.replace("{{ m.content }}", "{{ 'R' if loop.last }}{{ m.content }}")
    sample = only(ctx, FakeSource(marked), stage)
    assert trained(sample) == [*ids("b"), STOP, *ids("Rd"), STOP]


HEADED = (
    "{% for m in messages %}<|s|>{{ m.role }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ '\n' + m.content }}<|e|>{{ '\n' }}{% endgeneration %}"
    "{% else %}{{ '\n' + m.content }}<|e|>{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
)
"""Marks also the line breaks after a header and after the end of a turn, as TRL's training
templates of Qwen do."""


@pytest.mark.parametrize(
    ("fields", "said"), [({}, "bd"), ({"loss": "last"}, "d"), ({"loss": "assistant"}, "bd")]
)
def test_markers_are_taken_at_their_word(
    ctx: Context, chat: Any, fields: dict[str, Any], said: str
) -> None:
    sample = only(
        ctx, FakeSource(HEADED), chat({"messages": [*TWO_TURNS, message("user", "e")]}, **fields)
    )
    assert trained(sample) == [t for word in said for t in (*ids(f"\n{word}"), STOP, *ids("\n"))]
    silent = [TWO_TURNS[0], {**TWO_TURNS[1], "train": False}, *TWO_TURNS[2:]]
    sample = only(ctx, FakeSource(HEADED), chat({"messages": silent}, **fields))
    assert trained(sample) == [*ids("\nd"), STOP, *ids("\n")]


@pytest.mark.parametrize("marked", ["{% if m.role == 'user' %}", "{% if m.role == 'tool' %}"])
def test_markers_in_the_wrong_place_are_refused(ctx: Context, chat: Any, marked: str) -> None:
    template = MARKED.replace("{% if m.role == 'assistant' %}", marked)
    with pytest.raises(DataError, match="markers do not mark the assistant's turns"):
        chat({"messages": HELLO}).run(ctx, FakeSource(template))


def test_a_slow_tokenizer_is_refused(ctx: Context, source: FakeSource, chat: Any) -> None:
    source.fast = type("Slow", (), {"is_fast": False})()
    with pytest.raises(StageError, match=r"tokenizer\.json"):
        chat({"messages": HELLO}).run(ctx, source)


def test_the_bundled_conversations(ctx: Context, tmp_path: Path) -> None:
    bundled = Path(__file__).parents[3] / "recipes/data/chat.jsonl"
    data = ChatData(files=str(bundled), cache=str(tmp_path)).run(ctx, FakeSource())
    assert len(data.train) == 64

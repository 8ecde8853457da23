"""The same twenty conversations in every suitable form give the same samples.

`golden.json` was written by transformers: ids and assistant mask of a template with markers ({%
generation %}). The texts of the other fixtures have their own golden ids, or are short enough to be
composed here.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from pipeline.contracts.data import NO_TARGET, Samples
from pipeline.contracts.stage import Context
from pipeline.errors import StageError
from stages.data.chat import ChatData
from stages.data.tokenize import start_ids
from tests.stages.data.fakes import MARKED, PLAIN, SPECIAL, FakeSource, ids

FIXTURES = Path(__file__).parent / "fixtures"
FILES = {
    "messages": "messages.jsonl",
    "sharegpt": "sharegpt.json",
    "prompt/completion": "prompt_completion.jsonl.gz",
    "alpaca": "alpaca.parquet",
    "input_ids": "input_ids.jsonl",
}
END, START, STOP = SPECIAL["<|end|>"], SPECIAL["<|s|>"], SPECIAL["<|e|>"]
USER, BOT = {"role": "user", "content": "A"}, {"role": "assistant", "content": "b"}


def golden() -> list[dict[str, list[int]]]:
    rows: list[dict[str, list[int]]] = json.loads((FIXTURES / "golden.json").read_text("utf-8"))
    return rows


def tokens(samples: Samples) -> list[dict[str, list[int]]]:
    """Return the ids of each sample, and the trained ones with their places."""
    return [
        {
            "ids": samples[index].input_ids.tolist(),
            "labels": samples[index].labels.tolist(),
        }
        for index in range(len(samples))
    ]


def as_tokens(row: dict[str, list[int]]) -> dict[str, list[int]]:
    pairs = zip(row["ids"][1:], row["trained"][1:], strict=True)
    return {
        "ids": row["ids"][:-1],
        "labels": [token if trained else NO_TARGET for token, trained in pairs],
    }


@pytest.fixture
def chat(tmp_path: Path) -> Any:
    """Return a stage that reads a fixture, or the given rows."""

    def make(*rows: Any, **fields: Any) -> ChatData:
        if rows:
            fields["files"] = str(tmp_path / "rows.jsonl")
            Path(fields["files"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return ChatData(**{"cache": str(tmp_path / "cache"), **fields})

    return make


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize("form", FILES)
def test_every_form_gives_the_same_samples(
    ctx: Context, chat: Any, form: str, template: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stage = chat(files=str(FIXTURES / FILES[form]), loss="assistant")
    data = stage.run(ctx, FakeSource(template))
    assert tokens(data.train) == [as_tokens(row) for row in golden()]
    assert f"20 rows ({form}), 1,360 tokens" in caplog.text


def test_the_golden_tokens_are_those_of_transformers() -> None:
    fast = FakeSource(MARKED).fast
    lines = (FIXTURES / FILES["messages"]).read_text("utf-8").splitlines()
    for line, row in zip(lines, golden(), strict=True):
        encoded = fast.apply_chat_template(
            json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )  # fmt: skip
        assert row == {
            "ids": list(encoded["input_ids"]), "trained": list(encoded["assistant_masks"])
        }  # fmt: skip


def test_texts_of_a_file_of_lines(ctx: Context, chat: Any) -> None:
    data = chat(files=str(FIXTURES / "text.txt")).run(ctx, FakeSource(None, eos="<|end|>"))
    rows = json.loads((FIXTURES / "text.golden.json").read_text("utf-8"))
    assert len(rows) == 20
    assert tokens(data.train) == [{"ids": row[:-1], "labels": row[1:]} for row in rows]


def test_pairs_of_texts_without_a_template(ctx: Context, chat: Any) -> None:
    file, source = FIXTURES / "pairs.jsonl", FakeSource(None)
    data = chat(files=str(file), template=False).run(ctx, source)
    for index, line in enumerate(file.read_text("utf-8").splitlines()):
        row = json.loads(line)
        prompt, completion = (
            source.fast.encode(row[key], add_special_tokens=False, verbose=False)
            for key in ("prompt", "completion")
        )
        expected = {
            "ids": [*prompt, *completion, END], "trained": [0] * len(prompt) + [1] * 99
        }  # fmt: skip
        expected["trained"] = expected["trained"][: len(expected["ids"])]
        assert tokens(data.train)[index] == as_tokens(expected)


@pytest.mark.parametrize(
    ("bos", "prepend_bos", "start"),
    [
        ("<|s|>", None, [START]),
        ("<|s|>", False, []),
        ("<|s|>", True, [START]),
        (None, None, []),
    ],
)
def test_texts_begin_as_the_tokenizer_s_own_call_does(
    ctx: Context, chat: Any, bos: str | None, prepend_bos: bool | None, start: list[int]
) -> None:
    rows = ({"text": "ab"}, {"prompt": "a", "completion": "b"})
    for row, first in zip(rows, (64, NO_TARGET), strict=True):
        stage = chat(row, template=False, prepend_bos=prepend_bos)
        source = FakeSource(bos=bos)
        sample = stage.run(ctx, source).train[0]
        assert sample.input_ids.tolist() == [*start, 64, 65]
        assert sample.labels.tolist() == [first, 65, END][-len(start) - 2 :]
        if prepend_bos is None:
            called = source.fast("ab")["input_ids"]
            assert sample.input_ids.tolist() == called
    conversation = chat({"messages": [USER, BOT]}, prepend_bos=prepend_bos)
    assert conversation.run(ctx, FakeSource(bos=bos)).train[0].input_ids.tolist().count(START) == 2


class Spare:
    """A tokenizer with few ids, which puts 1 before a text and 2 after it."""

    def __init__(self, known: str) -> None:
        self.known = known

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        plain = [10 + self.known.index(letter) for letter in text if letter in self.known]
        return {"input_ids": [1, *plain, 2] if add_special_tokens else plain}


def test_what_is_put_behind_a_text_is_never_put_before_it() -> None:
    assert start_ids(Spare("01"), None) == [1]
    with pytest.raises(StageError, match="cannot be found"):
        start_ids(Spare("xyz"), None)


def test_a_text_s_beginning_is_part_of_the_cache_s_key(ctx: Context, chat: Any) -> None:
    stage = chat({"text": "ab"})
    asked = [None, False, None]
    prints = [
        dataclasses.replace(stage, prepend_bos=each).run(ctx, FakeSource(bos="<|s|>")).identity
        for each in asked
    ]
    assert prints[0] == prints[2]
    assert prints[0]["contents"] != prints[1]["contents"]
    assert (prints[0]["prepend_bos"], prints[1].get("prepend_bos")) == (True, None)


@pytest.mark.parametrize(
    "row",
    [{"messages": [USER, BOT]}, {"prompt": "a", "completion": "b"}, {"input_ids": [1, 2]}],
)
def test_data_without_a_text_are_the_same_whatever_texts_begin_with(
    ctx: Context, chat: Any, row: dict[str, Any]
) -> None:
    """Runs with conversations that began before texts had a beginning can be resumed."""
    stage, source = chat(row), FakeSource(bos="<|s|>")
    own, none = (
        dataclasses.replace(stage, prepend_bos=each).run(ctx, source).identity
        for each in (None, False)
    )
    assert own == none


def trained(samples: Samples, index: int = 0) -> list[int]:
    return [int(label) for label in samples[index].labels if label != NO_TARGET]


PROMPTED = {"prompt": [USER, BOT, USER], "completion": [{**BOT, "content": "c"}]}


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize(
    ("row", "loss", "expected"),
    [
        (PROMPTED, "completion", [*ids("c"), STOP]),
        (PROMPTED, "assistant", [*ids("b"), STOP, *ids("c"), STOP]),
        (PROMPTED, "last", [*ids("c"), STOP]),
        ({"messages": [USER, BOT, USER, BOT]}, "completion", [*ids("b"), STOP, *ids("b"), STOP]),
        (
            {"messages": [USER, BOT]},
            "all",
            [*ids("user\nA"), STOP, *ids("\n"), START, *ids("assistant\nb"), STOP, *ids("\n")],
        ),
        (
            {"messages": [USER, {**BOT, "train": False}, USER, {**BOT, "content": "c"}]},
            "assistant",
            [*ids("c"), STOP],
        ),
        (
            {"messages": [USER, {**BOT, "weight": 1}, USER, {**BOT, "weight": 0}]},
            "completion",
            [*ids("b"), STOP],
        ),
        (
            {"messages": [{**USER, "train": False}, BOT]},
            "all",
            [START, *ids("assistant\nb"), STOP, *ids("\n")],
        ),
        (
            {"messages": [{**BOT, "train": False}, USER, BOT]},
            "all",
            [
                START,
                *ids("user\nA"),
                STOP,
                *ids("\n"),
                START,
                *ids("assistant\nb"),
                STOP,
                *ids("\n"),
            ],
        ),
        ({"text": "ab"}, "completion", [*ids("b"), END]),
        ({"input_ids": [1, 2, 3], "loss_mask": [1, 0, 1]}, "all", [3]),
        ({"input_ids": [1, 2, 3]}, "last", [2, 3]),
    ],
)
def test_loss(
    ctx: Context, chat: Any, template: str, row: Any, loss: str, expected: list[int]
) -> None:
    data = chat(row, loss=loss).run(ctx, FakeSource(template))
    assert trained(data.train) == expected
    assert data.train.targets(0) == len(expected)


def test_an_assistant_message_may_come_first_if_it_is_not_trained_on(
    ctx: Context, source: FakeSource, chat: Any
) -> None:
    row = {"messages": [{**BOT, "train": False}, USER, {**BOT, "content": "c"}]}
    assert trained(chat(row).run(ctx, source).train) == [*ids("c"), STOP]


def test_tools_as_openai_writes_them(ctx: Context, chat: Any) -> None:
    """Arguments as JSON text become the object that templates expect, and so do tools in a
    table."""
    template = (
        "{% for t in tools or [] %}{{ t.name }};{% endfor %}{% for m in messages %}{{ m.role }}:"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.x }}"
        "{% endfor %}{{ m.content or '' }}<|e|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 7}'}}
    turns = [
        USER, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]},
        BOT,
    ]  # fmt: skip
    sharegpt = [
        {"from": "human", "value": "A"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 7}}'},
        {"from": "observation", "value": "42"},
        {"from": "gpt", "value": "b"},
    ]
    source = FakeSource(template)
    for row in ({"messages": turns}, {"conversations": sharegpt}):
        data = chat({**row, "tools": '[{"name": "F"}]'}).run(ctx, source)
        text = source.fast.decode(data.train[0].input_ids)
        assert text == "F;user:A<|e|>assistant:f7<|e|>tool:42<|e|>assistant:b"
        assert trained(data.train) == [*ids("f7"), STOP, *ids("b"), STOP]


def test_alpaca(ctx: Context, source: FakeSource, chat: Any) -> None:
    row = {"instruction": "do {input}", "input": "x", "output": "y"}
    turns = chat(row).run(ctx, source)
    assert source.fast.decode(turns.train[0].input_ids).startswith("<|s|>user\ndo {input}\nx<|e|>")
    plain = chat(row, template=False).run(ctx, source)
    text = source.fast.decode(plain.train[0].input_ids)
    assert text.endswith("\n\n### Instruction:\ndo {input}\n\n### Input:\nx\n\n### Response:\ny")
    assert trained(plain.train) == [*ids("y"), END]
    short = chat({**row, "input": ""}, template=False).run(ctx, source)
    assert "### Input" not in source.fast.decode(short.train[0].input_ids)


def test_a_row_of_two_forms_takes_the_one_that_is_named(
    ctx: Context, source: FakeSource, chat: Any
) -> None:
    row = {"messages": [USER, BOT], "text": "xy"}
    assert trained(chat(row, form="text").run(ctx, source).train) == [*ids("y"), END]
    # half of a form does not count: many tables have such columns beside `messages`
    both = chat({"messages": [USER, BOT], "prompt": "A", "prompt_id": "7"}).run(ctx, source)
    assert trained(both.train) == [*ids("b"), STOP]


def test_files_of_different_forms_go_together(
    ctx: Context, source: FakeSource, chat: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "b.json").write_text('[{"text": "xy"}, {"text": "z"}]')
    stage = chat({"messages": [USER, BOT]})
    data = ChatData(files=(stage.files, str(tmp_path / "b.json")), cache=stage.cache).run(
        ctx, source
    )
    assert [trained(data.train, i) for i in range(3)] == [
        [*ids("b"), STOP], [*ids("y"), END], [END]
    ]  # fmt: skip
    assert "3 rows (messages, text)" in caplog.text


def test_special_tokens_in_text(
    ctx: Context, source: FakeSource, chat: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A message cannot end its own turn: special tokens are refused (see test_mistakes), removed,
    or kept on purpose."""
    bad = {"messages": [{**USER, "content": "x<|e|>"}, BOT]}
    data = chat({"messages": [USER, BOT]}, bad, special_tokens="drop").run(ctx, source)
    assert len(data.train) == 1
    assert "dropped 1 row whose text spells a special token" in caplog.text
    assert "rows.jsonl:2" in caplog.text
    allowed = chat(bad, special_tokens="allow").run(ctx, source)
    assert allowed.train[0].input_ids.tolist().count(STOP) == 3


def test_nulls_of_a_table_are_no_keys(ctx: Context, source: FakeSource, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [[{**USER, "train": None, "name": "x"}, BOT], [USER, {**BOT, "train": False}, USER, BOT]]
    table = pyarrow.table({"messages": rows, "text": [None, None]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    stage = ChatData(files=str(tmp_path / "a.parquet"), cache=str(tmp_path / "cache"))
    data = stage.run(ctx, source)
    assert [trained(data.train, i) for i in range(2)] == [[*ids("b"), STOP]] * 2

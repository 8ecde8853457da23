"""Each mistake in data, a template or a setting is one clear error with its place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from pipeline import Context, StageError
from stages.data import rows
from stages.data.stages import TextData
from tests.stages.data.conftest import Chats
from tests.stages.data.fakes import MARKED, PLAIN, FakeSource

USER, ASSISTANT = {"role": "user", "content": "A"}, {"role": "assistant", "content": "b"}
GOOD = {"messages": [USER, ASSISTANT]}
CALL = {"name": "f", "arguments": {}}
LINE = json.dumps(GOOD).encode() + b"\n"
KEYS = "a row has one of: `messages`; `conversations`; `prompt` and `completion`; "


def said(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, ASSISTANT]}


def calling(call: Any) -> dict[str, Any]:
    return {"tools": [], "messages": [USER, {"role": "assistant", "tool_calls": call}]}


@pytest.fixture
def failed(chats: Chats) -> Any:
    """Return the message of rows that fail, which leave nothing in the cache."""

    def error(*given: Any, **fields: Any) -> str:
        found = chats.error(*given, **fields)
        assert not list((chats.folder / "cache").glob("*"))
        return found

    return error


@pytest.mark.parametrize(
    ("row", "error"),
    [
        (said("x\0"), "`messages[0].content` holds a NUL character"),
        (said("\ud800"), "`messages[0].content` holds half of a surrogate pair"),
        ({"prompt": "x", "completion": "y"},
         "a row of form 'prompt/completion' in a file of 'messages' rows"),
        ({"body": "x", "id": None}, f"fits no form; it has `body` ({KEYS}"),
        ({"prompt": "x"}, f"fits no form; it has `prompt` ({KEYS}"),
        ({**GOOD, "text": "x"}, "could be of form 'messages' or 'text' (set `form`)"),
        ({"messages": []}, "`messages` is not a list of messages, or an empty one"),
        ({"messages": "hi"}, "`messages` is text, not a list"),
        ({"messages": "[hi]"}, "`messages` is not JSON: Expecting value at column 2"),
        ({"messages": ["hi"]}, "`messages[0]` is text, not an object"),
        ({"messages": [USER, {"role": "asistant", "content": "b"}]},
         "`messages[1].role` is 'asistant', which is not a known role (did you mean "
         "`assistant`?)"),
        ({"messages": [{"content": "x"}]}, "`messages[0].role` is missing"),
        ({"messages": [{"role": "user"}]}, "`messages[0].content` is missing"),
        (said(3), "`messages[0].content` is a number, not text"),
        (said([{"type": "text", "text": "x"}, {"type": "image_url", "image_url": "u"}]),
         "`messages[0].content[1]` is of type 'image_url'; only 'text' can be read"),
        (said([{"type": "text"}]), "`messages[0].content[0].text` is missing"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]},
         "calls a tool, but has no `tools` (give the row the `tools` that may be called; use "
         "`tools: []` if the messages describe them)"),
        ({"tools": [], "messages": [{**USER, "tool_calls": [CALL]}]},
         "`messages[0]` calls a tool, but its role is 'user', not 'assistant'"),
        (calling([{"function": {"arguments": {}}}]),
         "`messages[1].tool_calls[0].function.name` is missing"),
        (calling([{"name": "f", "arguments": "{x"}]),
         "`messages[1].tool_calls[0].arguments` is not JSON: "),
        (calling([{"name": "f", "arguments": "[1]"}]),
         "`messages[1].tool_calls[0].arguments` is a list, not an object"),
        ({**GOOD, "tools": '{"name": "f"}'}, "`tools` is an object, not a list"),
        ({**GOOD, "chat_template_kwargs": 3}, "`chat_template_kwargs` is a number, not an object"),
        ({**GOOD, "chat_template_kwargs": {"mood": 1, "tokenize": True, "return_dict": True}},
         "`chat_template_kwargs` has 'return_dict', which is not a variable of the template ("),
        ({**GOOD, "chat_template_kwargs": {"strftime_now": "now"}},
         "`chat_template_kwargs` has 'strftime_now', which is not a variable of the template"),
        ({"messages": [USER, {**ASSISTANT, "train": 0}]},
         "`messages[1].train` is a number, not true or false"),
        ({"messages": [USER, {**ASSISTANT, "weight": 0.5}]},
         "`messages[1].weight` is 0.5, neither 0 nor 1"),
        (said("x<|e|>\n<|s|>assistant\nsure"),
         "its text spells the special token '<|e|>' (set `special_tokens: drop` to leave such "
         "rows out, or `allow` where the text is meant to hold it)"),
        (calling([{"name": "f", "arguments": {"x": ["<|end|>"]}}]),
         "its text spells the special token '<|end|>'"),
    ],
)  # fmt: skip
def test_a_row_after_a_good_one(failed: Any, row: Any, error: str) -> None:
    assert failed(GOOD, row).startswith(f"a.jsonl:2: {error}")


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"instruction": "x", "output": "y", "history": 5},
         "`history` is a number, not a list of pairs of texts"),
        ({"conversations": [{"from": "humann", "value": "x"}]},
         "`conversations[0].from` is 'humann', which is not a known role (did you mean "
         "`human`?)"),
        ({"conversations": [{"from": "human"}]}, "`conversations[0].value` is missing"),
        ({"prompt": "x", "completion": [ASSISTANT]}, "`completion` is a list, not text"),
        ({"instruction": "x", "output": ["y"]}, "`output` is a list, not text"),
        ({"text": "a<|end|>b"}, "its text spells the special token '<|end|>'"),
        ({"input_ids": [1, 259]}, "`input_ids[1]` is 259, but the model embeds 259 tokens"),
        ({"input_ids": [-1, 2]}, "`input_ids[0]` is -1, but the model embeds 259 tokens"),
        ({"input_ids": [1, 2.0]}, "`input_ids[1]` is a number with a fraction, not an"),
        ({"input_ids": "12"}, "`input_ids` is text, not a list of integers"),
        ({"input_ids": []}, "`input_ids` is empty"),
        ({"input_ids": [1, 2, 3], "labels": [1, 2]}, "`labels` has 2 entries, `input_ids` has 3"),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]},
         "`labels[0]` is 2, but `input_ids[0]` is 1 (a label is the id at the same position, "
         "not of the next, or -100)"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 2]}, "`loss_mask[2]` is 2, neither 0 nor 1"),
        ({"input_ids": [1, 2, 3], "labels": [1, 2, 3], "loss_mask": [0, 1, 1]},
         "has both `labels` and `loss_mask`"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 1, 0]},
         "`attention_mask` hides tokens (give the row without its padding)"),
    ],
)  # fmt: skip
def test_a_row(failed: Any, row: Any, error: str) -> None:
    assert failed(row).startswith(f"a.jsonl:1: {error}")


TWICE = {"messages": [USER, ASSISTANT, USER, ASSISTANT]}
IF_ASSISTANT = "{% if m.role == 'assistant' %}"
MISPLACED = "a.jsonl:1: the chat template's {% generation %} markers do not mark the assistant's"
MISPLACED += " turns (correct the template, or remove the markers)"


@pytest.mark.parametrize(
    ("row", "template", "fields", "error"),
    [
        ({"messages": [ASSISTANT]},
         PLAIN.replace("<|s|>{{ m.role }}", "<|s|>{{ m.role }}{{ '!' if loop.first }}"), {},
         "a.jsonl:1: begins with an assistant's message, whose beginning cannot be located: the "
         "chat template lays it out differently from its generation prompt (set "
         "`train: false` in that message, or "),
        ({"messages": [{"role": "narrator", "content": "x"}]}, PLAIN, {"roles": ("narrator",)},
         "a.jsonl:1: messages[0] is of role 'narrator', which the chat template does not lay "
         "out: who?"),
        (
            TWICE,
            PLAIN.replace("<|s|>", "<|s|>{{ messages|length }}").replace(
                "{{ m.content }}", "{{ m.content ~ m.content|length }}"
            ),
            {},
            "a.jsonl:1: the chat template renders messages[1] differently in a longer "
            "conversation, so that its tokens cannot be located (set `loss: last` or "
            "`turns: each`, or mark",
        ),
        (GOOD, MARKED.replace(IF_ASSISTANT, "{% if m.role == 'tool' %}"), {}, MISPLACED),
        (GOOD, MARKED.replace(IF_ASSISTANT, "{% if m.role == 'user' %}"), {}, MISPLACED),
        (TWICE, MARKED.replace(IF_ASSISTANT, "{% if m.role == 'assistant' and loop.last %}"), {},
         MISPLACED),
        (GOOD, PLAIN, {"sequence_length": 8, "too_long": "error"},
         "a.jsonl:1: 23 tokens, but `sequence_length` is 8"),
    ],
)  # fmt: skip
def test_templates_and_settings(
    failed: Any, row: Any, template: str, fields: Any, error: str
) -> None:
    assert failed(row, chat_template=template, **fields).startswith(error)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (LINE + b'{"text": "\xff"}\n',
         "a.jsonl:2: not UTF-8: byte 0xff at offset 10 (convert the file, for example with "
         "iconv)"),
        (LINE + b"\0\0\0", "a.jsonl:2: a NUL byte at offset 0 (the file is not UTF-8"),
        (b"", "a.jsonl:1: no row in this file"),
        (b"\n\n", "a.jsonl:1: no row in this file"),
        (LINE + LINE[:-9], "a.jsonl:2: not JSON: "),
        (LINE + LINE[:-1] + LINE, "a.jsonl:2: text after the object, at column "),
        (LINE + b"[1]\n",
         "a.jsonl:2: is a list, not an object (one JSON object a line; a .json file can also "
         "be one array of objects)"),
        (LINE + b'{"a":' * 200_000, "a.jsonl:2: not JSON: "),
        (b"[" + LINE.strip() + b", {", "a.json:1: not JSON: "),
        (b"[" + LINE, "a.json:1: not JSON: "),
        (b"[1]", "a.json:1: is a number, not an object"),
        (b"[" + LINE + b"] x", "a.json:1: text after the list, at line 2, column 3"),
        (b" [ ]\n", "a.json:1: no row in this file"),
        (b"not gzip", "a.jsonl.gz:1: cannot be read: "),
        (gzip.compress(LINE * 99)[:-9], "a.jsonl.gz:100: cannot be read: "),
        (b"PAR1 PAR1", "a.parquet:1: unreadable Parquet file"),
        (LINE + b'{"text": "' + b"x" * (65 << 20),
         "a.jsonl:2: a line of more than 64 MiB (put each row on its own line, and split "
         "longer documents)"),
    ],
    ids=range(17),
)  # fmt: skip
def test_files(failed: Any, tmp_path: Path, content: bytes, error: str) -> None:
    file = tmp_path / error.partition(":")[0]
    file.write_bytes(content)
    assert failed(files=str(file)).startswith(error)
    assert rows.LARGEST_LINE == 64 << 20


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"ok\nbad \xff\n", "a.txt:2: not UTF-8: byte 0xff at offset 7"),
        (b"ok\n\0", "a.txt:2: a NUL byte at offset 3"),
        (b"", "a.txt: no text in this file"),
        (b"not gzip", "a.txt.gz: cannot be read: "),
        (b'{"text": "x"}\n{"text": 3}', "a.jsonl:2: 'text' is a number, not text"),
        (b'{"text": null}', "a.jsonl:1: 'text' is missing"),
        (b'{"text": "x"}\n{"body": "y"}',
         "a.jsonl:2: no key 'text'; it has ['body'] (set `text_key`)"),
        (b'{"text": " "}', "a.jsonl: no text in this file"),
        (b"x", "a.txt: fewer than two tokens of text"),
        (gzip.compress(b'{"text": "x"}\n')[:-9], "a.jsonl.gz:2: cannot be read: "),
    ],
    ids=range(10),
)  # fmt: skip
def test_documents(
    ctx: Context, source: FakeSource, tmp_path: Path, content: bytes, error: str
) -> None:
    file = tmp_path / error.partition(":")[0]
    file.write_bytes(content)
    stage = TextData(files=str(file), cache=str(tmp_path / "cache"), append_eos=False)
    with pytest.raises(StageError) as caught:
        stage.run(ctx, source)
    assert str(caught.value).replace(f"{tmp_path}/", "").startswith(error)
    assert not list((tmp_path / "cache").glob("*"))


@pytest.mark.parametrize(
    ("form", "keys"),
    [
        ("messages", "`messages`"),
        ("sharegpt", "`conversations`"),
        ("prompt/completion", "`prompt` and `completion`"),
        ("alpaca", "`instruction` and `output`"),
        ("text", "`text`"),
        ("input_ids", "`input_ids`"),
    ],
)
def test_a_row_that_is_not_of_the_form_that_was_set(failed: Any, form: Any, keys: str) -> None:
    half = {key.strip("`"): None for key in keys.split(" and ")} | {"prompt": "x", "output": "y"}
    assert failed(half, form=form) == (
        f"a.jsonl:1: no {keys}; it has `output`, `prompt` (a row has one of: {keys}; "
        "`columns` says what they are called here)"
    )


def test_other_ends(failed: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"hello\n")
    assert failed(files=str(tmp_path / "a.txt"), form="messages").startswith(
        "a.txt:1: no `messages`; it has `text` (a row has one of: `messages`; `columns` says"
    )
    no_end = failed({"text": "a"}, source=FakeSource(eos=None))
    assert no_end.startswith("the tokenizer has no eos_token to end a completion with")


def test_parquet_tables(failed: Any, ctx: Context, source: FakeSource, tmp_path: Path) -> None:
    found = failed({"body": "x"}, name="a.parquet")
    assert found.startswith("a.parquet:1: fits no form; it has `body`")
    text = TextData(files=str(tmp_path / "a.parquet"), cache=str(tmp_path / "cache"))
    with pytest.raises(StageError, match=r"a\.parquet: no column 'text'; it has \['body'\]$"):
        text.run(ctx, source)


NOT_UTF8 = pyarrow.Array.from_buffers(
    pyarrow.string(), 2, pyarrow.array([b"ab", b"\xff"], pyarrow.binary()).buffers()
)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (pyarrow.array([0, 1 << 62], pyarrow.timestamp("us")), "date value out of range"),
        (pyarrow.array([0, (1 << 31) - 1], pyarrow.int32()).cast(pyarrow.date32()), "days="),
        (NOT_UTF8, "'utf-8' codec can't decode byte 0xff in position 0"),
    ],
    ids=["timestamp", "date", "UTF-8"],
)
def test_values_of_a_table_that_python_has_none_for(
    failed: Any, tmp_path: Path, values: Any, words: str
) -> None:
    good = pyarrow.nulls(1024, values.type)
    columns = {"text": ["x"] * 1026, "x": pyarrow.chunked_array([good, values])}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    found = failed(files=str(tmp_path / "a.parquet"))
    assert found.startswith(f"a.parquet:1025: unreadable Parquet file: {words}")

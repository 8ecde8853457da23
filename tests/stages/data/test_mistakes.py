"""Each mistake in data, a template or a setting gives one clear error with its place."""

from __future__ import annotations

import gzip
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet
import pytest

from pipeline.contracts.stage import Context
from pipeline.errors import StageError
from pipeline.testing import plan_view
from stages.data import messages, rows
from stages.data.chat import ChatData
from stages.data.sources import Source
from stages.data.text import TextData
from tests.stages.data.fakes import MARKED, PLAIN, FakeSource

USER = {"role": "user", "content": "A"}
ASSISTANT = {"role": "assistant", "content": "b"}
GOOD = {"messages": [USER, ASSISTANT]}
CALL = {"name": "f", "arguments": {}}


class Case(NamedTuple):
    """Content of a file (or its rows), and the error that it gives."""

    content: Any
    error: str
    file: str = "a.jsonl"
    template: str | None = PLAIN
    fields: Mapping[str, Any] = {}


def second(row: Any, error: str, **more: Any) -> Case:
    """Return a good row, and one with a mistake."""
    return Case([GOOD, row], f"a.jsonl:2: {error}", **more)


def said(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, ASSISTANT]}


def calling(call: Any) -> dict[str, Any]:
    return {"tools": [], "messages": [USER, {"role": "assistant", "tool_calls": call}]}


def ids(**row: Any) -> Any:
    return [{"input_ids": [1, 2]}, {"input_ids": [1, 2, 3], **row}]


LINE = json.dumps(GOOD).encode() + b"\n"
KEYS = "a row has one of: `messages`; `conversations`; `prompt` and `completion`; "

CHAT = {
    "invalid UTF-8": Case(
        LINE + b'{"text": "\xff"}\n',
        "a.jsonl:2: not UTF-8: byte 0xff at offset 10 (convert the file, for example with iconv)",
    ),
    "NUL byte": Case(LINE + b"\0\0\0", "a.jsonl:2: a NUL byte at offset 0 (the file is not UTF-8"),
    "NUL in JSON": second(said("x\0"), "`messages[0].content` holds a NUL character"),
    "half a surrogate pair": second(
        said("\ud800"), "`messages[0].content` holds half of a surrogate pair"
    ),
    "empty file": Case(b"", "a.jsonl:1: no row in this file"),
    "blank file": Case(b"\n\n", "a.jsonl:1: no row in this file"),
    "truncated JSON": Case(LINE + LINE[:-9], "a.jsonl:2: not JSON: "),
    "two objects a line": Case(
        LINE + LINE[:-1] + LINE, "a.jsonl:2: text after the object, at column "
    ),
    "a row that is no object": Case(
        LINE + b"[1]\n",
        "a.jsonl:2: is a list, not an object (one JSON object a line; a .json file can also be one "
        "array of objects)",
    ),
    "truncated array": Case(
        b"[" + LINE.strip() + b", {", "a.json:1: not JSON: ", file="a.json"
    ),
    "array cut behind an element": Case(
        b"[" + LINE, "a.json:1: not JSON: ", file="a.json"
    ),
    "array of numbers": Case(b"[1]", "a.json:1: is a number, not an object", file="a.json"),
    "text behind an array": Case(
        b"[" + LINE + b"] x", "a.json:1: text after the list, at line 2, column 3", file="a.json"
    ),
    "empty array": Case(b" [ ]\n", "a.json:1: no row in this file", file="a.json"),
    "deep JSON": Case(LINE + b'{"a":' * 200_000, "a.jsonl:2: not JSON: "),
    "mixed forms": second(
        {"prompt": "x", "completion": "y"},
        "a row of form 'prompt/completion' in a file of 'messages' rows",
    ),
    "no form": second({"body": "x", "id": None}, f"fits no form; it has `body` ({KEYS}"),
    "half a form": second({"prompt": "x"}, f"fits no form; it has `prompt` ({KEYS}"),
    "two forms": second(
        {**GOOD, "text": "x"}, "could be of form 'messages' or 'text' (set `form`)"
    ),
    "no messages": second(
        {"messages": []}, "`messages` is not a list of messages, or an empty one"
    ),
    "messages as text": second({"messages": "hi"}, "`messages` is text, not a list"),
    "messages as text that is no JSON": second(
        {"messages": "[hi]"}, "`messages` is not JSON: Expecting value at column 2"
    ),
    "a message as text": second({"messages": ["hi"]}, "`messages[0]` is text, not an object"),
    "unknown role": second(
        {"messages": [USER, {"role": "asistant", "content": "b"}]},
        "`messages[1].role` is 'asistant', which is not a known role (did you mean `assistant`?)",
    ),
    "missing role": second({"messages": [{"content": "x"}]}, "`messages[0].role` is missing"),
    "missing content": second(
        {"messages": [{"role": "user"}]}, "`messages[0].content` is missing"
    ),
    "content of the wrong type": second(said(3), "`messages[0].content` is a number, not text"),
    "a part that is no text": second(
        said([{"type": "text", "text": "x"}, {"type": "image_url", "image_url": "u"}]),
        "`messages[0].content[1]` is of type 'image_url'; only 'text' can be read",
    ),
    "a part without text": second(
        said([{"type": "text"}]), "`messages[0].content[0].text` is missing"
    ),
    "tool call without tools": second(
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]},
        "calls a tool, but has no `tools` (give the row the `tools` that may be called; use "
        "`tools: []` if the messages describe them)",
    ),
    "a user calls a tool": second(
        {"tools": [], "messages": [{**USER, "tool_calls": [CALL]}]},
        "`messages[0]` calls a tool, but its role is 'user', not 'assistant'",
    ),
    "a call without name": second(
        calling([{"function": {"arguments": {}}}]),
        "`messages[1].tool_calls[0].function.name` is missing",
    ),
    "arguments that are no JSON": second(
        calling([{"name": "f", "arguments": "{x"}]),
        "`messages[1].tool_calls[0].arguments` is not JSON: ",
    ),
    "arguments that are no object": second(
        calling([{"name": "f", "arguments": "[1]"}]),
        "`messages[1].tool_calls[0].arguments` is a list, not an object",
    ),
    "tools that are no list": second(
        {**GOOD, "tools": '{"name": "f"}'}, "`tools` is an object, not a list"
    ),
    "template arguments that are no object": second(
        {**GOOD, "chat_template_kwargs": 3}, "`chat_template_kwargs` is a number, not an object"
    ),
    "template arguments that are transformers' own": second(
        {**GOOD, "chat_template_kwargs": {"mood": 1, "tokenize": True, "return_dict": True}},
        "`chat_template_kwargs` has 'return_dict', which is not a variable of the template (",
    ),
    "a clock in the row": second(
        {**GOOD, "chat_template_kwargs": {"strftime_now": "now"}},
        "`chat_template_kwargs` has 'strftime_now', which is not a variable of the template",
    ),
    "history that is no list": Case(
        [{"instruction": "x", "output": "y", "history": 5}],
        "a.jsonl:1: `history` is a number, not a list of pairs of texts",
    ),
    "train is a number": second(
        {"messages": [USER, {**ASSISTANT, "train": 0}]},
        "`messages[1].train` is a number, not true or false",
    ),
    "weight is a share": second(
        {"messages": [USER, {**ASSISTANT, "weight": 0.5}]},
        "`messages[1].weight` is 0.5, neither 0 nor 1",
    ),
    "an assistant's first turn that has no place": second(
        {"messages": [ASSISTANT]},
        "begins with an assistant's message, whose beginning cannot be located: the chat template "
        "lays it out differently from its generation prompt (set `train: false` in that "
        "message, or ",
        template=PLAIN.replace("<|s|>{{ m.role }}", "<|s|>{{ m.role }}{{ '!' if loop.first }}"),
    ),
    "unknown ShareGPT name": Case(
        [{"conversations": [{"from": "humann", "value": "x"}]}],
        "a.jsonl:1: `conversations[0].from` is 'humann', which is not a known role (did you mean "
        "`human`?)",
    ),
    "ShareGPT without a value": Case(
        [{"conversations": [{"from": "human"}]}],
        "a.jsonl:1: `conversations[0].value` is missing",
    ),
    "a pair of text and messages": Case(
        [{"prompt": "x", "completion": [ASSISTANT]}],
        "a.jsonl:1: `completion` is a list, not text",
    ),
    "Alpaca's output as a list": Case(
        [{"instruction": "x", "output": ["y"]}], "a.jsonl:1: `output` is a list, not text"
    ),
    "template that raises": second(
        {"messages": [{"role": "narrator", "content": "x"}]},
        "messages[0] is of role 'narrator', which the chat template does not lay out: who?",
        fields={"roles": ("narrator",)},
    ),
    "template whose prefixes do not match": Case(
        [{"messages": [USER, ASSISTANT, USER, ASSISTANT]}],
        "a.jsonl:1: the chat template renders messages[1] differently in a longer conversation, "
        "so that its tokens cannot be located (set `loss: last` or `turns: each`, or mark",
        template=PLAIN.replace("<|s|>", "<|s|>{{ messages|length }}").replace(
            "{{ m.content }}", "{{ m.content ~ m.content|length }}"
        ),
    ),
    "template whose markers mark nothing": Case(
        [GOOD],
        "a.jsonl:1: the chat template's {% generation %} markers do not mark the assistant's turns "
        "(correct the template, or remove the markers)",
        template=MARKED.replace("{% if m.role == 'assistant' %}", "{% if m.role == 'tool' %}"),
    ),
    "template whose markers mark the user": Case(
        [GOOD],
        "a.jsonl:1: the chat template's {% generation %} markers do not mark the assistant's turns",
        template=MARKED.replace("{% if m.role == 'assistant' %}", "{% if m.role == 'user' %}"),
    ),
    "template whose markers mark one turn of two": Case(
        [{"messages": [USER, ASSISTANT, USER, ASSISTANT]}],
        "a.jsonl:1: the chat template's {% generation %} markers do not mark the assistant's turns",
        template=MARKED.replace(
            "{% if m.role == 'assistant' %}", "{% if m.role == 'assistant' and loop.last %}"
        ),
    ),
    "zero trainable tokens": Case(
        [{"messages": [USER]}, {"messages": [USER, {**ASSISTANT, "train": False}]}],
        "no token to train on in 2 rows: 1 row without a message of the assistant; "
        "1 row without a token to train on (check `loss`",
    ),
    "too long": Case(
        [GOOD],
        "a.jsonl:1: 23 tokens, but `sequence_length` is 8",
        fields={"sequence_length": 8, "too_long": "error"},
    ),
    "ids beyond the vocabulary": Case(
        ids(input_ids=[1, 259]),
        "a.jsonl:2: `input_ids[1]` is 259, but the model embeds 259 tokens",
    ),
    "negative ids": Case(
        ids(input_ids=[-1, 2]), "a.jsonl:2: `input_ids[0]` is -1, but the model embeds 259 tokens"
    ),
    "float ids": Case(
        ids(input_ids=[1, 2.0]), "a.jsonl:2: `input_ids[1]` is a number with a fraction, not an"
    ),
    "text as ids": Case(
        ids(input_ids="12"), "a.jsonl:2: `input_ids` is text, not a list of integers"
    ),
    "no ids": Case(ids(input_ids=[]), "a.jsonl:2: `input_ids` is empty"),
    "labels of another length": Case(
        ids(labels=[1, 2]), "a.jsonl:2: `labels` has 2 entries, `input_ids` has 3"
    ),
    "shifted labels": Case(
        ids(labels=[2, 3, -100]),
        "a.jsonl:2: `labels[0]` is 2, but `input_ids[0]` is 1 (a label is the id at the "
        "same position, not of the next, or -100)",
    ),
    "a mask of shares": Case(
        ids(loss_mask=[0, 1, 2]), "a.jsonl:2: `loss_mask[2]` is 2, neither 0 nor 1"
    ),
    "labels and a mask": Case(
        ids(labels=[1, 2, 3], loss_mask=[0, 1, 1]), "a.jsonl:2: has both `labels` and `loss_mask`"
    ),
    "padded ids": Case(
        ids(attention_mask=[1, 1, 0]),
        "a.jsonl:2: `attention_mask` hides tokens (give the row without its padding)",
    ),
    "a special token in a message": second(
        said("x<|e|>\n<|s|>assistant\nsure"),
        "its text spells the special token '<|e|>' (set `special_tokens: drop` to leave such rows "
        "out, or `allow` where the text is meant to hold it)",
    ),
    "a special token in a tool call": second(
        calling([{"name": "f", "arguments": {"x": ["<|end|>"]}}]),
        "its text spells the special token '<|end|>'",
    ),
    "a special token in a text": Case(
        [{"text": "a<|end|>b"}], "a.jsonl:1: its text spells the special token '<|end|>'"
    ),
    "not gzip": Case(b"not gzip", "a.jsonl.gz:1: cannot be read: ", file="a.jsonl.gz"),
    "damaged gz": Case(
        gzip.compress(LINE * 99)[:-9], "a.jsonl.gz:100: cannot be read: ", file="a.jsonl.gz"
    ),
    "damaged Parquet": Case(b"PAR1 PAR1", "a.parquet:1: unreadable Parquet file", "a.parquet"),
    "no end token": Case(
        [{"text": "a"}],
        "the tokenizer has no eos_token to end a completion with",
        template="no eos",
    ),
}  # fmt: skip

TEXT = {
    "invalid UTF-8": Case(b"ok\nbad \xff\n", "a.txt:2: not UTF-8: byte 0xff at offset 7", "a.txt"),
    "NUL byte": Case(b"ok\n\0", "a.txt:2: a NUL byte at offset 3", "a.txt"),
    "empty file": Case(b"", "a.txt: no text in this file", "a.txt"),
    "damaged gz": Case(b"not gzip", "a.txt.gz: cannot be read: ", "a.txt.gz"),
    "a number": Case([{"text": "x"}, {"text": 3}], "a.jsonl:2: 'text' is a number, not text"),
    "null": Case([{"text": None}], "a.jsonl:1: 'text' is missing"),
    "no key": Case(
        [{"text": "x"}, {"body": "y"}],
        "a.jsonl:2: no key 'text'; it has ['body'] (set `text_key`)",
    ),
    "blank": Case([{"text": " "}], "a.jsonl: no text in this file"),
    "one token": Case(
        b"x", "a.txt: fewer than two tokens of text", "a.txt", fields={"append_eos": False}
    ),
    "truncated gz": Case(
        gzip.compress(b'{"text": "x"}\n')[:-9], "a.jsonl.gz:2: cannot be read: ", "a.jsonl.gz"
    ),
}


def written(path: Path, content: Any) -> Path:
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content).encode()
    path.write_bytes(content)
    return path


def error_of(tmp_path: Path, stage: Callable[[], Any]) -> str:
    """Return the message without the folder; nothing may be left in the cache."""
    with pytest.raises(StageError) as caught:
        stage()
    assert not list((tmp_path / "cache").glob("*"))
    return str(caught.value).replace(f"{tmp_path}/", "")


@pytest.mark.parametrize("case", CHAT.values(), ids=CHAT.keys())
def test_rows(ctx: Context, tmp_path: Path, case: Case) -> None:
    file = written(tmp_path / case.file, case.content)
    source = FakeSource(eos=None) if case.template == "no eos" else FakeSource(case.template)
    stage = ChatData(files=str(file), cache=str(tmp_path / "cache"), **case.fields)
    assert error_of(tmp_path, lambda: stage.run(ctx, source)).startswith(case.error)


def test_every_argument_of_transformers_is_reserved() -> None:
    arguments = inspect.signature(FakeSource().fast.apply_chat_template).parameters
    assert set(arguments) - {"tools", "documents", "kwargs"} <= messages.RESERVED


@pytest.mark.parametrize("case", TEXT.values(), ids=TEXT.keys())
def test_documents(ctx: Context, source: FakeSource, tmp_path: Path, case: Case) -> None:
    file = written(tmp_path / case.file, case.content)
    stage = TextData(files=str(file), cache=str(tmp_path / "cache"), **case.fields)
    assert error_of(tmp_path, lambda: stage.run(ctx, source)).startswith(case.error)


def test_a_line_of_100_mb(ctx: Context, source: FakeSource, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(LINE + b'{"text": "' + b"x" * 100_000_000)
    stage = ChatData(files=str(file), cache=str(tmp_path / "cache"))
    assert error_of(tmp_path, lambda: stage.run(ctx, source)) == (
        "a.jsonl:2: a line of more than 64 MiB (put each row on its own line, and split "
        "longer documents)"
    )
    assert rows.LARGEST_LINE == 64 << 20


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
def test_a_row_that_is_not_of_the_form_that_was_set(
    ctx: Context, source: FakeSource, tmp_path: Path, form: Any, keys: str
) -> None:
    half = {key.strip("`"): None for key in keys.split(" and ")} | {"prompt": "x", "output": "y"}
    file = written(tmp_path / "a.jsonl", [half])
    stage = ChatData(files=str(file), cache=str(tmp_path / "cache"), form=form)
    assert error_of(tmp_path, lambda: stage.run(ctx, source)) == (
        f"a.jsonl:1: no {keys}; it has `output`, `prompt` (a row has one of: {keys}; "
        "`columns` says what they are called here)"
    )


def test_lines_of_text_are_no_messages(ctx: Context, source: FakeSource, tmp_path: Path) -> None:
    file = written(tmp_path / "a.txt", b"hello\n")
    stage = ChatData(files=str(file), cache=str(tmp_path / "cache"), form="messages")
    assert error_of(tmp_path, lambda: stage.run(ctx, source)).startswith(
        "a.txt:1: no `messages`; it has `text` (a row has one of: `messages`; `columns` says"
    )


def test_parquet_tables(ctx: Context, source: FakeSource, tmp_path: Path) -> None:
    file, cache = tmp_path / "a.parquet", str(tmp_path / "cache")
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), file)
    text = TextData(files=str(file), cache=cache)
    assert error_of(tmp_path, lambda: text.run(ctx, source)) == (
        "a.parquet: no column 'text'; it has ['body']"
    )
    chat = ChatData(files=str(file), cache=cache)
    assert error_of(tmp_path, lambda: chat.run(ctx, source)).startswith(
        "a.parquet:1: fits no form; it has `body`"
    )


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
    ctx: Context, source: FakeSource, tmp_path: Path, values: Any, words: str
) -> None:
    file = tmp_path / "a.parquet"
    good = pyarrow.nulls(1024, values.type)
    columns = {"text": ["x"] * 1026, "x": pyarrow.chunked_array([good, values])}
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    stage = ChatData(files=str(file), cache=str(tmp_path / "cache"))
    told = error_of(tmp_path, lambda: stage.run(ctx, source))
    assert told.startswith(f"a.parquet:1025: unreadable Parquet file: {words}")


HUB = {"dataset": "owner/name", "revision": "0" * 40}


def problems(stage: Any) -> list[tuple[str, str]]:
    return [(problem.key, problem.message) for problem in stage.check(plan_view())]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt", "a.csv"):
        Path(name).write_text("x")


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [("files", "no file is named")]),
        ({"files": ()}, [("files", "no file is named")]),
        ({"files": "no*.txt"}, [("files", "no such file: no*.txt")]),
        ({"files": "a.csv"}, [("files", "a.csv: unknown kind of file")]),
        ({"files": ("a.txt", "*.txt")}, [("files", "a.txt is named twice")]),
        (
            {"files": "a.txt", "heldout_files": "*.txt"},
            [("heldout_files", "a.txt is also trained on")],
        ),
        (
            {"files": "a.txt", "heldout_files": "b.txt", "heldout_fraction": 0.1},
            [("heldout_fraction", "excludes `heldout_files`")],
        ),
        (
            {"files": "a.txt", "sources": (Source(files="b.txt"),)},
            [("files", "excludes `sources`")],
        ),
        ({"sources": (Source(),)}, [("sources.0.files", "no file is named")]),
        (
            {"sources": (Source(files="a.txt"), Source(files="*.txt"))},
            [("sources.1", "a.txt is in sources[0] already")],
        ),
        (
            {"sources": (Source(files="a.txt", revision="main"),)},
            [("sources.0.revision", "`revision` is only for a hub `dataset`")],
        ),
        (
            {"sources": (Source(files="a.txt", **HUB),)},
            [("sources.0.files", "excludes `dataset`")],
        ),
        (
            {"sources": (Source(dataset="./here", revision="0" * 40),)},
            [("sources.0.dataset", "'./here' is not a hub id (owner/name)")],
        ),
        ({"sources": (Source(dataset="owner/name"),)}, []),
        (
            {"sources": (Source(dataset="owner/name", revision="a b"),)},
            [("sources.0.revision", "'a b' is not a commit, branch or tag")],
        ),
        ({"sources": (Source(dataset="owner/name", revision="v1"),)}, []),
        (
            {"sources": (Source(**HUB),), "heldout_sources": (Source(**HUB),)},
            [("heldout_sources.0", "owner/name/train is also trained on")],
        ),
        ({"sources": (Source(**HUB),), "heldout_sources": (Source(**HUB, split="test"),)}, []),
        (
            {"files": "a.txt", "heldout_files": "b.txt", "heldout_sources": (Source(**HUB),)},
            [("heldout_sources", "excludes `heldout_files`")],
        ),
    ],
)
@pytest.mark.parametrize("stage", [ChatData, TextData])
def test_settings(stage: Any, fields: Any, expected: list[tuple[str, str]]) -> None:
    assert problems(stage(**fields)) == expected


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf")])
def test_weights(weight: float) -> None:
    from pipeline.testing import problems as found

    (problem,) = found(ChatData, {"sources": [{"files": "a.txt", "weight": weight}]})
    assert problem.key == "sources.0.weight"

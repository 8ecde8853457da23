"""Names of keys and roles, lists of objects that are written in other ways, and nulls that stand
for keys that a row does not have."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from stages.data.chat_entries import ChatEntries
from stages.data.messages import RESERVED
from stages.data.sources import OpenedSource
from stages.data.stages import ChatData, ChatSource
from stages.digests import digest
from tests.stages.data.conftest import Chats
from tests.stages.data.fakes import MARKED, PLAIN, FakeSource

USER, BOT = {"role": "user", "content": "A"}, {"role": "assistant", "content": "b"}
HELLO = "<|s|>user\nA<|e|>\n<|s|>assistant\nb<|e|>"
TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}<|e|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
DIALOG = {"dialog": [{"speaker": "human", "text": "A"}, {"speaker": "bot", "text": "b"}]}
CALLED = {"columns": {"messages": "dialog", "role": "speaker", "content": "text"},
          "role_names": {"bot": "assistant", "human": "user"}}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        (DIALOG, CALLED),
        ({**DIALOG, "messages": [USER]}, CALLED),
        (
            DIALOG,
            {
                "columns": {"conversations": "dialog", "from": "speaker", "value": "text"},
                "role_names": {"bot": "gpt"},
            },
        ),
        ({"q": "A", "a": "b"}, {"columns": {"instruction": "q", "output": "a"}}),
        ({"q": "A", "a": "b", "input": "x"}, {"columns": {"prompt": "q", "completion": "a"}}),
        ({"completion": "A", "prompt": "b"},
         {"columns": {"prompt": "completion", "completion": "prompt"}}),
        ({"conversations": [USER, BOT]}, {"columns": {"messages": "conversations"}}),
        ({"text": "A", "completion": "b"}, {"columns": {"prompt": "text"}}),
        ({"prompt": "A", "completion": "b", "text": "x"},
         {"columns": {"instruction": "prompt", "output": "completion", "text": "y"}}),
        ({"conversations": [{"role": "user", "content": "A"}, {"role": "bot", "content": "b"}]},
         {"role_names": {"bot": "assistant"}}),
    ],
)  # fmt: skip
def test_columns_and_roles(chats: Chats, row: Any, fields: Any) -> None:
    assert chats.texts(row, **fields) == [HELLO]


def test_a_source_has_names_of_its_own(chats: Chats) -> None:
    dialog = chats.stage(DIALOG, name="b.jsonl").files
    other = chats.stage({"chat": [USER, {**BOT, "role": "bot"}]}).files
    sources = (ChatSource(files=dialog, columns=CALLED["columns"]), ChatSource(files=other))
    names = {"columns": {"messages": "chat"}, "role_names": CALLED["role_names"]}
    assert chats.texts(files=(), sources=sources, **names) == [HELLO, HELLO]


def test_names_are_part_of_what_the_tokens_are(chats: Chats) -> None:
    row = {"messages": [USER, {**BOT, "other": "c"}, {**USER, "other": "C"}][:2]}
    row["messages"][0] = {**USER, "other": "A"}
    plain = chats.texts(row)
    renamed = chats.texts(row, columns={"content": "other"})
    assert (plain, renamed) == ([HELLO], [HELLO.replace("\nb", "\nc")])


def test_a_column_that_a_row_does_not_have(chats: Chats) -> None:
    assert chats.error({"messages": [USER, BOT]}, columns={"messages": "dialog"}) == (
        "a.jsonl:1: fits no form; it has `messages` (a row has one of: `dialog`; `conversations`; "
        "`prompt` and `completion`; `instruction` and `output`; `text`; `input_ids`)"
    )


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.json"])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": {"role": ["user", "assistant"], "content": ["A", "b"]}},
        {"messages": {"role": ["user", "assistant"], "content": ["A", "b"], "name": [None, None]}},
        {"messages": json.dumps([USER, BOT])},
        {"conversations": {"from": ["human", "gpt"], "value": ["A", "b"]}},
        {"conversations": json.dumps([{"from": "human", "value": "A"}, BOT])},
        {"prompt": {"role": ["user"], "content": ["A"]}, "completion": [BOT]},
        {"messages": [USER, BOT], "tools": ""},
        {"messages": [USER, BOT], "tools": "null", "documents": " "},
        {"messages": [USER, {**BOT, "tool_calls": "null"}]},
        {"messages": [{**USER, "content": {"type": ["text"], "text": ["A"]}}, {**BOT,
         "content": {"type": ["text"], "text": ["b"]}}]},
    ],
)  # fmt: skip
def test_lists_in_other_writings(chats: Chats, row: Any, name: str) -> None:
    assert chats.texts(row, name=name) == [HELLO]


def test_calls_in_other_writings(chats: Chats) -> None:
    calls = [{"name": name, "arguments": {}} for name in "fg"]
    listed = {"name": ["f", "g"], "arguments": ["{}", "{}"]}
    plain = {
        "tools": [{"name": "f"}, {"name": "g"}],
        "messages": [USER, {**BOT, "tool_calls": calls}],
    }
    lists = {"tools": {"name": ["f", "g"]}, "messages": [USER, {**BOT, "tool_calls": listed}]}
    text = {"tools": json.dumps(plain["tools"]), "messages": json.dumps(plain["messages"])}
    found = chats.texts(plain, lists, text, chat_template=TOOLS)
    assert found[0] == found[1] == found[2]
    assert found[0].startswith('[{"name": "f"}, {"name": "g"}]user:A<|e|>assistant:b{"name": "f"')


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"messages": {"role": ["user", "assistant"], "content": ["A"]}},
         "`messages` holds lists of different lengths: 2 of 'role', 1 of 'content'"),
        ({"messages": {"role": "user"}}, "`messages` is not a list of messages, or an empty one"),
        ({"messages": "null"}, "`messages` is not a list of messages, or an empty one"),
        ({"messages": [USER, BOT], "tools": "[{]"}, "`tools` is not JSON: "),
        ({"messages": [USER, BOT], "documents": {}}, "`documents` is an object, not a list"),
        ({"prompt": json.dumps([USER]), "completion": "b"},
         "`prompt` is text that looks like a list of messages as JSON"),
        ('{"messages": [{"role": "user", "content": "x", "content": "y"}]}',
         "`messages[0]` has the key 'content' twice (leave out the one that is not meant)"),
        ('{"messages": [], "messages": []}', "has the key 'messages' twice"),
        ('{"id": {"a": [0, {"b": 1, "b": 1}]}, "text": "x"}', "`id.a[1]` has the key 'b' twice"),
        ({"messages": '[{"role": "user", "role": "user", "content": "x"}]'},
         "`messages[0]` has the key 'role' twice"),
        (
            {"tools": [], "messages": [USER, {"role": "assistant", "tool_calls": [
                {"name": "f", "arguments": '{"x": 1, "x": 2}'}]}]},
            "`messages[1].tool_calls[0].arguments` has the key 'x' twice",
        ),
    ],
)  # fmt: skip
def test_mistakes(chats: Chats, row: Any, error: str) -> None:
    assert chats.error(row).startswith(f"a.jsonl:1: {error}")


def test_a_key_twice_in_an_array(chats: Chats, tmp_path: Path) -> None:
    good = json.dumps({"text": "x"})
    (tmp_path / "a.json").write_text(f'[{good}, {{"text": "y", "text": "z"}}, {good}]')
    stage = ChatData(files=str(tmp_path / "a.json"), cache=str(tmp_path / "c"), bad_rows="drop")
    assert len(stage.run(chats.ctx, FakeSource()).train) == 2
    assert chats.error(files=stage.files).startswith("a.json:2: has the key 'text' twice")


def spec(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


CALL = {"id": None, "function": {"name": "a", "arguments": {"x": 1, "y": None}}}
FILLED = {
    "messages": [{**USER, "tool_calls": None}, {**BOT, "tool_calls": [CALL]}],
    "tools": [spec("a", x={"type": "integer"}, y=None), spec("b", x=None, y={"type": "integer"})],
}
CLEAN = {
    "messages": [USER, {**BOT, "tool_calls": [{"function": {"name": "a",
                                                            "arguments": {"x": 1}}}]}],
    "tools": [spec("a", x={"type": "integer"}), spec("b", y={"type": "integer"})],
}  # fmt: skip


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_nulls_that_stand_for_no_key(
    chats: Chats, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They are removed whatever the kind of file, and each start says so."""
    for _ in range(2):
        caplog.clear()
        found = chats.texts(FILLED, chat_template=TOOLS, name=name)
        assert (
            "removed nulls from objects in 1 row, the first: "
            f"{chats.folder}/{name}:1, `tools[0].function.parameters.properties.y` (they stand for "
        ) in caplog.text
    caplog.clear()
    assert "null" not in found[0]
    assert found == chats.texts(CLEAN, chat_template=TOOLS)
    assert "removed nulls" not in caplog.text


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{**USER, "name": None, "tool_calls": None}, {**BOT, "train": None}]},
        {"messages": [{**USER, "content": [{"type": "text", "text": "A", "image": None}]}, BOT]},
        {"messages": [USER, BOT], "tools": None, "meta": {"x": None}},
        {
            "messages": [USER, {**BOT, "tool_calls": [{"name": "f", "arguments": '{"y": null}'}]}],
            "tools": '[{"name": "f", "default": null}]',
        },
    ],
)  # fmt: skip
def test_nulls_that_need_no_word(chats: Chats, row: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A message without a key, and nulls in JSON text, which are meant."""
    (text,) = chats.texts(row, chat_template=TOOLS)
    assert "removed nulls" not in caplog.text
    assert text.count("null") == (2 if row.get("tools") else 0)


def test_only_data_whose_tokens_have_changed_are_other_data(chats: Chats) -> None:
    """So runs of earlier versions can be resumed, unless they were trained on such nulls."""
    for name, more in (("a.parquet", ""), ("a.jsonl", "-nulls:1")):
        stage = chats.stage(FILLED, name=name)
        work = ChatEntries(stage, chats.ctx, FakeSource(TOOLS))
        earlier = work.key(OpenedSource(*stage.all_sources()[0])).partition("-")[0]
        data = stage.run(chats.ctx, FakeSource(TOOLS))
        assert data.identity["contents"] == digest([earlier + more])


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize(
    ("loss", "said"), [("assistant", ["b", "c"]), ("completion", ["b", "c"]), ("last", ["c"])]
)
def test_an_assistant_may_open_a_conversation(
    chats: Chats, template: str, loss: str, said: list[str]
) -> None:
    row = {"messages": [BOT, USER, {**BOT, "content": "c"}]}
    found = chats.trained(row, chat_template=template, loss=loss)
    assert found == [[f"{each}<|e|>" for each in said]]


def test_an_opening_after_a_system_text_of_the_template(chats: Chats) -> None:
    template = "<|s|>system\nbe kind<|e|>\n" + PLAIN
    found = chats.trained({"messages": [BOT, USER, BOT]}, chat_template=template)
    assert found == [["b<|e|>", "b<|e|>"]]


def test_every_argument_of_transformers_is_reserved() -> None:
    arguments = inspect.signature(FakeSource().fast.apply_chat_template).parameters
    assert set(arguments) - {"tools", "documents", "kwargs"} <= RESERVED

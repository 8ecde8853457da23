"""What a chat template refuses, in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.contracts.stage import Context
from pipeline.errors import BadRows, DataError
from stages.data.chat import ChatData
from tests.stages.data.fakes import PLAIN, FakeSource

USER, BOT = {"role": "user", "content": "A"}, {"role": "assistant", "content": "b"}
TOOL = {"role": "tool", "content": "4"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLING = {"role": "assistant", "tool_calls": [CALL]}
TEXT = PLAIN.replace("{{ m.content }}", "{{ m.content + '' }}")


def raising(condition: str, words: str = "no") -> str:
    return f"{{% if {condition} %}}{{{{ raise_exception('{words}') }}}}{{% endif %}}"


def each(condition: str) -> str:
    return "{% for m in messages %}" + raising(condition) + "{% endfor %}" + TEXT


PARTS = PLAIN.replace("{{ m.content }}", "{{ m.content[0]['text'] + '' }}")
"""Takes contents as parts, as SmolVLM's."""
SAYS = each("m.tool_calls and not m.content")
ALTERNATE = each("(m.role == 'user') != (loop.index0 % 2 == 0)")


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (SAYS, [USER, CALLING], "messages[1] has tool calls and no content"),
        (SAYS, [USER, BOT, USER, CALLING, TOOL, BOT], "messages[3] has tool calls and no content"),
        (
            each("m.tool_calls and m.tool_calls | length > 1"),
            [USER, {**CALLING, "content": "b", "tool_calls": [CALL, CALL]}],
            "messages[1] has several tool calls",
        ),
        (
            each("m.tool_calls"),
            [USER, {**CALLING, "content": "b"}],
            "messages[1] has tool calls",
        ),
        (each("not m.content"), [{**USER, "content": ""}, BOT], "messages[0] has an empty content"),
        (each("m.role == 'tool'"), [USER, BOT, TOOL, BOT], "messages[2] is of role 'tool'"),
        (each("m.name"), [{**USER, "name": "x"}, BOT], "messages[0] has `name`"),
        (
            ALTERNATE,
            [USER, BOT, BOT],
            "messages[2] is of role 'assistant' after one of role 'assistant'",
        ),
        (ALTERNATE, [BOT, USER, BOT], "messages[0] is of role 'assistant' and the first"),
        (raising("tools") + PLAIN, [USER, BOT], "the row has `tools`"),
        (
            "{% for m in messages %}" + raising("m.role == 'tool'") + "{% endfor %}" + PARTS,
            [USER, BOT, TOOL, BOT],
            "messages[2] is of role 'tool'",
        ),
        (
            "{% for m in messages %}" + raising("m.name") + "{% endfor %}" + PARTS,
            [USER, {**BOT, "name": "x"}],
            "messages[1] has `name`",
        ),
    ],
)
def test_message_and_cause(
    ctx: Context, tmp_path: Path, template: str, messages: Any, expected: str
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": messages, "tools": [{"name": "f"}]}))
    stage = ChatData(files=str(file), cache=str(tmp_path / "cache"))
    with pytest.raises(DataError) as caught:
        stage.run(ctx, FakeSource(template))
    told = caught.value.message
    assert told.startswith(f"{expected}, which the chat template does not lay out: ")
    assert not told.endswith(": ")


def test_a_template_that_refuses_everything(ctx: Context, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": [USER, BOT]}))
    stage = ChatData(files=str(file), cache=str(tmp_path / "cache"))
    with pytest.raises(DataError) as caught:
        stage.run(ctx, FakeSource(raising("true", "never") + PLAIN))
    assert caught.value.message == (
        "the chat template refuses messages[0], whose role is 'user': never"
    )


def test_rows_of_one_kind_are_counted(ctx: Context, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    rows = [[USER, BOT]] + [[USER, BOT] * n + [USER, CALLING] for n in range(50)]
    file.write_text("".join(json.dumps({"messages": m, "tools": []}) + "\n" for m in rows))
    stage = ChatData(files=str(file), cache=str(tmp_path / "cache"))
    with pytest.raises(BadRows) as caught:
        stage.run(ctx, FakeSource(SAYS))
    (kind,) = caught.value.kinds
    assert caught.value.kinds[kind] == 50
    assert kind.startswith("messages[…] has tool calls and no content, which the chat template")

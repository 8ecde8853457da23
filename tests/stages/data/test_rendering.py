"""What a chat template refuses, in words; and the date that it is told."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import BadRows
from stages.data.rendering import with_date
from tests.stages.data.conftest import Chats
from tests.stages.data.fakes import PLAIN, FakeSource
from tests.support.tier import examples

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
        (each("m.tool_calls and m.tool_calls | length > 1"),
         [USER, {**CALLING, "content": "b", "tool_calls": [CALL, CALL]}],
         "messages[1] has several tool calls"),
        (each("m.tool_calls"), [USER, {**CALLING, "content": "b"}], "messages[1] has tool calls"),
        (each("not m.content"), [{**USER, "content": ""}, BOT], "messages[0] has an empty content"),
        (each("m.role == 'tool'"), [USER, BOT, TOOL, BOT], "messages[2] is of role 'tool'"),
        (each("m.name"), [{**USER, "name": "x"}, BOT], "messages[0] has `name`"),
        (ALTERNATE, [USER, BOT, BOT],
         "messages[2] is of role 'assistant' after one of role 'assistant'"),
        (ALTERNATE, [BOT, USER, BOT], "messages[0] is of role 'assistant' and the first"),
        (raising("tools") + PLAIN, [USER, BOT], "the row has `tools`"),
        ("{% for m in messages %}" + raising("m.role == 'tool'") + "{% endfor %}" + PARTS,
         [USER, BOT, TOOL, BOT], "messages[2] is of role 'tool'"),
        ("{% for m in messages %}" + raising("m.name") + "{% endfor %}" + PARTS,
         [USER, {**BOT, "name": "x"}], "messages[1] has `name`"),
    ],
)  # fmt: skip
def test_message_and_cause(chats: Chats, template: str, messages: Any, expected: str) -> None:
    row = {"messages": messages, "tools": [{"name": "f"}]}
    told = chats.error(row, chat_template=template)
    assert told.startswith(f"a.jsonl:1: {expected}, which the chat template does not lay out: ")
    assert not told.endswith(": ")


def test_a_template_that_refuses_everything(chats: Chats) -> None:
    told = chats.error({"messages": [USER, BOT]}, chat_template=raising("true", "never") + PLAIN)
    assert told == "a.jsonl:1: the chat template refuses messages[0], whose role is 'user': never"


def test_rows_of_one_kind_are_counted(chats: Chats) -> None:
    rows = [[USER, BOT]] + [[USER, BOT] * n + [USER, CALLING] for n in range(50)]
    with pytest.raises(BadRows) as caught:
        chats.run(*({"messages": each, "tools": []} for each in rows), chat_template=SAYS)
    (kind,) = caught.value.kinds
    assert caught.value.kinds[kind] == 50
    assert kind.startswith("messages[…] has tool calls and no content, which the chat template")


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
        said = [{"role": "user", "content": content} for content in contents]
        return str(fast.apply_chat_template(said, chat_template=template, tokenize=False))

    told = rendered(with_date(template, f"{day:%Y-%m-%d}"), asked)
    assert told == rendered(plain, [day.strftime(each) for each in asked])

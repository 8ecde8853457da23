"""Turns under the mechanics of published templates: see also tests/docs/test_chat_templates.py."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pipeline import DataError, StageError
from tests.stages.data.conftest import Chats, decoded, trained_ids
from tests.stages.data.fakes import MARKED, PLAIN
from tests.support.tier import times

HEAD = "{% for m in messages %}<|s|>{{ m.role }}\n"
TAIL = "<|e|>\n{% endfor %}{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
LAST_BLOCK = HEAD + "{{ '[]' if m.role == 'assistant' and loop.last }}{{ m.content }}" + TAIL
"""Gives the last answer an empty block of thoughts, as Qwen3's."""
OPENS = PLAIN.replace("<|s|>assistant\n{% endif", "<|s|>assistant\n<t>\n{% endif")
"""Its generation prompt opens a thought that a finished answer does not have, as R1 Distill's."""
CLOSES = PLAIN + "{% if not add_generation_prompt %}<|end|>{% endif %}"
"""Ends with another token unless more is to come, as Phi-3's."""
THINKS = HEAD + "{% if loop.last and m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
THINKS += "{{ m.content }}" + TAIL
"""Leaves out the thoughts of earlier turns."""
RETURNED = "{{ '<|end|>' if loop.last and not add_generation_prompt else '<|e|>' }}"
RETURNS = PLAIN.replace("<|e|>", RETURNED)
"""Ends the last message otherwise than those before it, as gpt-oss's."""
ENDLESS = "{% for m in messages %}<|s|>{{ m.role }}\n{{ m.content }}{% endfor %}"
ENDLESS += "{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
"""Ends a turn with the token that begins the next, as GLM's."""
TEXT_ARGUMENTS = HEAD + "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
TEXT_ARGUMENTS += "{{ '[' + c.function.name + c.function.arguments + ']' }}{% endfor %}" + TAIL
"""Joins the arguments of a call as text, as DeepSeek's."""
CALLS = TEXT_ARGUMENTS.replace("c.function.arguments +", "(c.function.arguments | tojson) +")
PARTS = HEAD + "{% for p in m.content %}{{ p.text }}{% endfor %}" + TAIL


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(name: str = "f", arguments: Any = None) -> dict[str, Any]:
    function = {"name": name, "arguments": {"town": "Oslo"} if arguments is None else arguments}
    return {"type": "function", "function": function}


CHAT = [said("user", "A"), said("assistant", "b"), said("user", "C"), said("assistant", "d")]
THOUGHTS = [CHAT[0], said("assistant", "b", reasoning_content="why"), *CHAT[2:]]


@pytest.fixture
def trained(chats: Chats) -> Any:
    """Return a call that returns the trained runs of each sample of some rows, as text."""

    def run(template: str, *rows: Any, **fields: Any) -> list[list[str]]:
        given = [{"tools": [], **(r if isinstance(r, dict) else {"messages": r})} for r in rows]
        return chats.trained(*given, chat_template=template, **{"loss": "assistant", **fields})

    return run


@pytest.mark.parametrize(
    ("template", "turns"),
    [
        (LAST_BLOCK, ["b<|e|>", "[]d<|e|>"]),
        (OPENS, ["b<|e|>", "d<|e|>"]),
        (CLOSES, ["b<|e|>", "d<|e|>\n<|end|>"]),
        (ENDLESS, ["b<|s|>", "d<|s|>"]),
        (PARTS, ["b<|e|>", "d<|e|>"]),
    ],
    ids=["last block", "opens a thought", "another end", "next token", "parts"],
)
def test_turns_of_templates_that_render_a_turn_by_its_place(
    trained: Any, template: str, turns: list[str]
) -> None:
    assert trained(template, CHAT) == [turns]
    assert trained(template, CHAT, loss="last") == [turns[-1:]]
    assert trained(template, CHAT[:2]) == [[turns[1].replace("d<", "b<")]]


@settings(
    max_examples=times(quick=20, full=200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@example(contents=["<", "<"], template=PARTS)  # which is in any text
@given(
    contents=st.lists(st.text("<[t>\né🎉 a", max_size=6).filter(str.strip), min_size=2, max_size=6),
    template=st.sampled_from([LAST_BLOCK, OPENS, CLOSES, PARTS, PLAIN]),
)
def test_every_turn_is_trained_from_its_first_to_its_last_character(
    trained: Any, contents: list[str], template: str
) -> None:
    chat = [said("user" if at % 2 == 0 else "assistant", c) for at, c in enumerate(contents)]
    (runs,) = trained(template, chat, sequence_length=4096)
    answers = [message["content"] for message in chat if message["role"] == "assistant"]
    last = chat[-1]["role"] == "assistant"
    blocks = ["[]" if template == LAST_BLOCK and last else ""]
    starts = [*[""] * (len(answers) - 1), *blocks]
    if template == OPENS:  # what an answer has in common with the thought is in the prompt
        answers = [answer.removeprefix("<t>\n") for answer in answers]
    ends = ["<|e|>"] * len(answers)
    if template == CLOSES and last:
        ends[-1] += "\n<|end|>"
    assert runs == [a + b + c for a, b, c in zip(starts, answers, ends, strict=True)]


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        (said("assistant", "", tool_calls=[call()]), "call 1 ('f') of messages[1] and 1 more"),
        ({"role": "assistant", "tool_calls": [call("g")]}, "call 1 ('g')"),
        (said("assistant", "", function_call={"name": "f", "arguments": "{}"}), "call ('f')"),
        (said("assistant", "b", reasoning_content="why"), "thoughts of messages[1]"),
        (said("assistant", "b", thinking="why"), "thoughts of messages[1]"),
        (said("assistant", "b", tool_calls=[call(arguments={"x": 1})]), "call 1 ('f')"),
    ],
    ids=["call", "only a call", "function_call", "reasoning", "thinking", "content and call"],
)
def test_what_a_template_leaves_out_is_an_error(
    trained: Any, caplog: pytest.LogCaptureFixture, message: Any, lost: str
) -> None:
    template = PLAIN.replace("m.content", "m.content or ''")
    with pytest.raises(DataError) as caught:
        trained(template, CHAT, [CHAT[0], message])
    assert f"a.jsonl:2: the chat template leaves out {lost}" in str(caught.value)
    assert trained(template, CHAT, [CHAT[0], message], unrendered="drop") == [["b<|e|>", "d<|e|>"]]
    assert "dropped 1 row whose chat template leaves out part of what is said" in caplog.text
    content = message.get("content") or ""
    rows = trained(template, [CHAT[0], message], unrendered="allow")
    assert rows == [[f"{content}<|e|>"]]
    assert "1 row whose chat template leaves out part of what is said" in caplog.text


def test_arguments_in_the_form_that_the_template_takes(
    trained: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        [CHAT[0], said("assistant", "", tool_calls=[call(arguments=each)])]
        for each in ({"town": "Oslo"}, '{"town": "Oslo"}')
    ]
    wanted = [['[f{"town": "Oslo"}]<|e|>']] * 2
    assert trained(TEXT_ARGUMENTS, *rows) == wanted
    assert "2 rows whose messages were given to the chat template in another form" in caplog.text
    assert trained(CALLS, *rows) == wanted
    prints = TEXT_ARGUMENTS.replace("c.function.arguments +", "c.function.arguments ~")
    assert trained(prints, *rows) == wanted  # not Python's {'town': 'Oslo'}


@pytest.mark.parametrize("keys", [("reasoning_content", "thinking"), ("reasoning", "thinking")])
def test_thoughts_under_two_keys(trained: Any, keys: tuple[str, str]) -> None:
    template = THINKS.replace("m.reasoning_content", "m.thinking")
    same, other = (said("assistant", "b", **dict(zip(keys, texts, strict=True)))
                   for texts in (("why", "why\n"), ("why", "how")))  # fmt: skip
    assert trained(template, [CHAT[0], same]) == [["[why\n]b<|e|>"]]
    named = " and ".join(f"`{key}`" for key in keys)
    with pytest.raises(DataError, match=rf"`messages\[1\]` has different thoughts under {named}"):
        trained(template, [CHAT[0], other])
    assert trained(template, CHAT, [CHAT[0], other], bad_rows="drop") == [["b<|e|>", "d<|e|>"]]


@pytest.mark.parametrize(
    ("fraction", "answers", "held"),
    [(0.1, "bcccdd", 2), (0.5, "bcccdd", 2), (0.5, "bbbc", 1), (0.25, "bbcccc", 4), (0.5, "bc", 1)],
)
@pytest.mark.parametrize("packing", [False, True])
def test_turns_of_a_conversation_are_held_out_together(
    chats: Chats, fraction: float, answers: str, held: int, packing: bool
) -> None:
    counts = {letter: answers.count(letter) for letter in answers}
    rows = [[CHAT[0], said("assistant", letter)] * count for letter, count in counts.items()]
    data = chats.run(
        *({"messages": row} for row in rows), turns="each", heldout_fraction=fraction,
        packing=packing, sequence_length=128,
    )  # fmt: skip

    def found(samples: Any) -> str:
        labels = [token for at in range(len(samples)) for token in trained_ids(samples[at])]
        return "".join(sorted(decoded(labels).replace("<|e|>", "")))

    assert (found(data.train), found(data.heldout)) == (answers[:-held], answers[-held:])


def test_a_turn_that_nothing_ends(trained: Any, caplog: pytest.LogCaptureFixture) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    assert trained(template, CHAT) == [["b\n", "d\n"]]
    assert "1 row with turns that no special token ends" in caplog.text
    caplog.clear()
    assert trained(PLAIN, CHAT) == [["b<|e|>", "d<|e|>"]]
    assert "special token" not in caplog.text


def test_empty_answers(trained: Any, caplog: pytest.LogCaptureFixture) -> None:
    empty = [*CHAT[:3], said("assistant", " ")]
    assert trained(PLAIN, empty, CHAT) == [["b<|e|>", " <|e|>"], ["b<|e|>", "d<|e|>"]]
    assert "1 row with an empty answer, which is trained as the end of a turn" in caplog.text
    assert trained(PLAIN, empty, CHAT, empty="drop") == [["b<|e|>", "d<|e|>"]]
    with pytest.raises(DataError, match=r"messages\[3\] is an answer that says nothing"):
        trained(PLAIN, empty, CHAT, empty="error")
    unseen = [CHAT[0], said("assistant", "", train=False), *CHAT[2:]]
    assert trained(PLAIN, unseen, empty="error") == [["d<|e|>"]]


@pytest.mark.parametrize(
    ("template", "contents", "turns"),
    [
        (RETURNS, ["b", "d"], ["b<|e|>", "d<|end|>"]),
        (RETURNS, ["", "d"], ["<|e|>", "d<|end|>"]),
        (LAST_BLOCK, ["", "d"], ["<|e|>", "[]d<|e|>"]),
        (CLOSES, ["", "d"], ["<|e|>", "d<|e|>\n<|end|>"]),
        (CLOSES.replace("<|e|>\n", "<|e|>"), ["", ""], ["<|e|>", "<|e|><|end|>"]),
    ],
)
def test_a_turn_that_ends_otherwise_where_it_is_the_last(
    trained: Any,
    caplog: pytest.LogCaptureFixture,
    template: str,
    contents: list[str],
    turns: list[str],
) -> None:
    first, last = (said("assistant", content) for content in contents)
    assert trained(template, [CHAT[0], first, CHAT[2], last]) == [turns]
    assert "the token that begins the next message" not in caplog.text
    assert "no special token ends" not in caplog.text


EMPTY_TOO = PLAIN.replace("m.content", "m.content or ''")
BY_NAME = CALLS.replace("(c.function.arguments | tojson) +", "c.function.arguments.x ~")
THINKING = THINKS.replace("m.reasoning_content", "m.thinking")
UPPER = "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}<|e|> {% endfor %}"
UPPER += "{% if add_generation_prompt %}ASSISTANT: <think>\n{% endif %}"
ICONS = said("user", "".join(map(chr, range(0xF0000, 0xF0009))))
"""Fonts with icons use the private planes of Unicode, as marks do."""
OLDER = {"name": "f", "arguments": "{}"}


def calling(*calls: Any, user: Any = CHAT[0]) -> list[Any]:
    return [user, {"role": "assistant", "content": None, "tool_calls": list(calls)}]


@pytest.mark.parametrize(
    ("template", "row", "error"),
    [
        (CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"), calling(call(), call()),
         "leaves out call 2 ('f') of messages[1] and 1 more"),
        (CALLS.replace("m.content or ''", "(m.content or '') if m.role != 'tool'"),
         [*calling(call()), said("tool", "d"), CHAT[3]], "leaves out content of messages[2] ("),
        (BY_NAME, calling(call(arguments={"y": 7})), "leaves out arguments of call 1"),
        (MARKED, THOUGHTS[:2], "leaves out thoughts"),
        (EMPTY_TOO, calling(call(), user=ICONS), "leaves out call 1"),
        (EMPTY_TOO, [CHAT[0], {"role": "assistant", "content": None, "function_call": OLDER}],
         "leaves out call ('f')"),
        (THINKS, THOUGHTS, "leaves out thoughts of messages[1] (set `turns: each`"),
    ],
)  # fmt: skip
def test_what_is_left_out(trained: Any, template: str, row: Any, error: str) -> None:
    with pytest.raises(DataError, match=re.escape(error)):
        trained(template, row)


BOTH = ["b<|e|>", "d<|e|>"]


@pytest.mark.parametrize(
    ("template", "row", "fields", "samples"),
    [
        (BY_NAME, calling(call(arguments={"x": 7})), {}, [["[f7]<|e|>"]]),
        (CALLS, calling(call(arguments="")), {}, [["[f{}]<|e|>"]]),
        (THINKING, [CHAT[0], said("assistant", "b", reasoning_content="why")], {},
         [["[why]b<|e|>"]]),
        (LAST_BLOCK, [ICONS, CHAT[1], ICONS, CHAT[3]], {}, [["b<|e|>", "[]d<|e|>"]]),
        (UPPER, CHAT, {}, [BOTH]),
        (UPPER, CHAT[1:], {}, [BOTH]),
        (PLAIN, CHAT[1:], {}, [BOTH]),
        (OPENS, CHAT[1:], {}, [BOTH]),
        (CLOSES, CHAT[1:], {}, [["b<|e|>", "d<|e|>\n<|end|>"]]),
        (THINKS, THOUGHTS, {"loss": "last"}, [["d<|e|>"]]),
        (THINKS, THOUGHTS, {"turns": "each"}, [["[why]b<|e|>"], ["d<|e|>"]]),
        (THINKS, THOUGHTS, {"unrendered": "allow"}, [BOTH]),
        (THINKS, [THOUGHTS[0], {**THOUGHTS[1], "train": False}, *THOUGHTS[2:]], {"turns": "each"},
         [["d<|e|>"]]),
        (THINKS, [THOUGHTS[0], {**THOUGHTS[1], "train": False}, *THOUGHTS[2:]], {}, [["d<|e|>"]]),
    ],
)  # fmt: skip
def test_what_is_trained_on(
    trained: Any, template: str, row: Any, fields: Any, samples: list[list[str]]
) -> None:
    assert trained(template, row, **fields) == samples


def test_notes(trained: Any, caplog: pytest.LogCaptureFixture) -> None:
    row = {"messages": CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}
    assert trained(PLAIN, row) == [BOTH]
    assert "1 row with `tools` or `documents` that the chat template does not show" in caplog.text
    # in parts, as SmolVLM's template takes them
    assert trained(PARTS, [*CHAT[:3], said("assistant", "")]) == [["b<|e|>", "<|e|>"]]
    assert "1 row with an empty answer, which is trained as the end of a turn" in caplog.text
    with pytest.raises(StageError, match="leaves none to train on"):
        trained(PLAIN, CHAT, turns="each", heldout_fraction=0.5)

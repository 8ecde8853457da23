"""Reasons why a chat template refuses a conversation: it is rendered with one thing changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stages.data.layouts import with_text_arguments

Renders = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], bool]
"""Whether the template lays out these messages with these further arguments."""
_WORDS = 300
"""Characters of the template's own words that are shown."""


def refusal(
    given: Sequence[Mapping[str, Any]],
    extra: Mapping[str, Any],
    error: Exception,
    renders: Renders,
) -> str:
    """Return what the template refuses of some messages with their further arguments, and its own
    words for it."""
    words = " ".join(str(error).split())[:_WORDS] or type(error).__name__
    messages = list(given)
    for key in extra:
        rest = {name: value for name, value in extra.items() if name != key}
        if renders(messages, rest):
            return f"the row has `{key}`, which the chat template does not lay out: {words}"
    last = last_message(messages, extra, renders)
    before, changes = messages[: last - 1], _changes(messages[:last])
    found = (what for what, instead in changes if renders([*before, *instead], extra))
    what = next(found, None)
    where = f"messages[{last - 1}]"
    if what is None:
        role = messages[last - 1]["role"] if messages else "none"
        return f"the chat template refuses {where}, whose role is {role!r}: {words}"
    return f"{where} {what}, which the chat template does not lay out: {words}"


def last_message(
    messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any], renders: Renders
) -> int:
    """Return a number of messages that the template refuses while it takes one less, or refuses
    all."""
    taken, refused = 0, len(messages)
    while refused - taken > 1:
        middle = (taken + refused) // 2
        if renders(messages[:middle], extra):
            taken = middle
        else:
            refused = middle
    return refused


def _changes(
    messages: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Yield what the last of some messages may be refused for, and messages without that."""
    if not messages:
        return
    last = dict(messages[-1])
    role, calls = last["role"], last.get("tool_calls")
    before = messages[-2]["role"] if len(messages) > 1 else None
    filled = {**last, "content": "x"}
    if "content" not in last:
        yield "has tool calls and no content" if calls else "has no content", [filled]
    elif not last["content"]:
        yield "has an empty content", [filled]
    if calls:
        plain = {key: value for key, value in filled.items() if key != "tool_calls"}
        as_text = [with_text_arguments(call) for call in calls]
        yield "has tool calls with arguments as an object", [{**last, "tool_calls": as_text}]
        if len(calls) > 1:
            yield "has several tool calls", [{**last, "tool_calls": calls[:1]}]
        yield "has tool calls", [plain]
    for key in last.keys() - {"role", "content", "tool_calls"}:
        yield f"has `{key}`", [{name: each for name, each in last.items() if name != key}]
    if before is None and role != "user":
        user = {"role": "user", "content": "x"}
        yield f"is of role {role!r} and the first", [user, last]
    other = "assistant" if before == "user" else "user"
    if before is not None and role != other:
        between = {"role": other, "content": "x"}
        yield f"is of role {role!r} after one of role {before!r}", [between, last]
    yield f"is of role {role!r}", []
    yield f"is of role {role!r}", [{**_text(last), "role": "user"}]


def _text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of text alone."""
    return {"role": message["role"], "content": message.get("content") or "x"}

"""The same messages in the forms in which chat templates take them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stages.data.marks import CALLS, REASONING

Messages = Sequence[Mapping[str, Any]]


def layouts(messages: Messages) -> Iterator[Messages]:
    """Yield the messages as they are, and in each other form that says the same.

    Templates take the arguments of calls as objects or as JSON text, a call without a content or
    with null or an empty text for it, thoughts under one of several keys, and contents as text or
    as lists of parts.
    """
    yield messages
    calls = any(message.get(key) for message in messages for key in CALLS)
    silent = any(_silent_call(message) for message in messages)
    empties = ("as is", "", None) if silent else ("as is",)
    for as_text, empty in itertools.product((False, True) if calls else (), empties):
        if as_text or empty != "as is":
            yield [_with_calls(message, as_text=as_text, empty=empty) for message in messages]
    for key in REASONING if any(_reasoning(message) for message in messages) else ():
        yield [_with_reasoning(message, key) for message in messages]
    yield [_in_parts(message) for message in messages]


def prints_python(messages: Messages, text: str) -> bool:
    """Whether a rendering shows the arguments of a call as Python prints a dict, not as JSON."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    given = [(call.get("function") or call).get("arguments") for call in calls]
    shown = [repr(each) for each in given if isinstance(each, dict) and each]
    return any(each in text for each in shown)


def _silent_call(message: Mapping[str, Any]) -> bool:
    return any(message.get(key) for key in CALLS) and not message.get("content")


def _with_calls(message: Mapping[str, Any], *, as_text: bool, empty: str | None) -> dict[str, Any]:
    copy = {**message}
    if _silent_call(message) and empty != "as is":
        copy["content"] = empty
    if as_text and message.get("tool_calls"):
        copy["tool_calls"] = [with_text_arguments(call) for call in message["tool_calls"]]
    if as_text and isinstance(message.get("function_call"), Mapping):
        copy["function_call"] = with_text_arguments(message["function_call"])
    return copy


def with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as JSON text."""
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": with_text_arguments(call["function"])}
    if not isinstance(call.get("arguments"), Mapping):
        return dict(call)
    return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}


def _reasoning(message: Mapping[str, Any]) -> str | None:
    return next((key for key in REASONING if message.get(key)), None)


def _with_reasoning(message: Mapping[str, Any], key: str) -> dict[str, Any]:
    given = _reasoning(message)
    if given is None:
        return dict(message)
    return {key if name == given else name: value for name, value in message.items()}


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if not isinstance(content, str):
        return dict(message)
    return {**message, "content": [{"type": "text", "text": content}]}

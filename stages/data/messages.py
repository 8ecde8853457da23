"""Messages in OpenAI's form: a list of {role, content}, with tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.utils.text import did_you_mean
from stages.data.rows import Row, kind, require_text


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages for the chat template."""

    row: Row
    messages: Sequence[Mapping[str, Any]]
    first: int = 0
    """Index of the first message behind the row's prompt; 0 without one."""
    silent: frozenset[int] = frozenset()
    """Indices of messages that are not trained on, whatever is asked for."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of the chat template: `tools`, `documents`, and what the row has under
    `chat_template_kwargs`."""

    def texts(self) -> list[Any]:
        """All that the row itself says, in which a special token has no place."""
        return [*self.messages, self.extra]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A prompt and the text behind it, as they are; no chat template. Without a prompt the text is
    a document of its own."""

    row: Row
    prompt: str
    completion: str

    def texts(self) -> list[Any]:
        """All that the row itself says."""
        return [self.prompt, self.completion]


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Token ids and, for each, whether it is trained on."""

    row: Row
    ids: Sequence[int]
    trained: Sequence[bool]


Item = Conversation | Completion | Tokens


ROLES = ("system", "developer", "user", "assistant", "tool")
_TEMPLATE_KEYS = ("tools", "documents")
RESERVED = frozenset({
    "conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message",
    "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "strftime_now",
})  # fmt: skip
"""Names that `apply_chat_template` or its template has a meaning for: no row sets them."""


def item(row: Row, roles: Sequence[str]) -> Conversation:
    """A row with `messages`. Raises DataError for what is wrong in it."""
    return conversation(row, checked(row, row.value["messages"], "messages", roles))


def conversation(
    row: Row, messages: Sequence[Mapping[str, Any]], *, first: int = 0
) -> Conversation:
    """Messages that are `checked`, with what else the row has for the template. What only tells
    whether a message is trained on is taken out of them."""
    extra = _extra(row)
    if "tools" not in extra and any(message.get("tool_calls") for message in messages):
        raise row.error(
            "calls a tool, but has no `tools`",
            hint="give the row the `tools` that may be called; an empty list says that the "
            "messages themselves tell of them",
        )
    silent = frozenset(i for i, message in enumerate(messages) if not _is_trained(row, message, i))
    plain = [{k: v for k, v in m.items() if k not in ("train", "weight")} for m in messages]
    return Conversation(row=row, messages=plain, first=first, silent=silent, extra=extra)


def checked(row: Row, messages: Any, key: str, roles: Sequence[str]) -> list[dict[str, Any]]:
    """A list of messages under `key`: known roles, content as text, calls with their arguments as
    objects. Raises DataError."""
    if not isinstance(messages, list) or not messages:
        raise row.error(f"`{key}` is not a list of messages, or an empty one")
    known = (*ROLES, *roles)
    return [_message(row, each, f"{key}[{index}]", known) for index, each in enumerate(messages)]


def require_role(row: Row, role: Any, where: str, known: Sequence[str]) -> str:
    """A role that is known; raises DataError for another."""
    text = require_text(row, role, f"`{where}`")
    if text not in known:
        raise row.error(f"`{where}` is {text!r}, which is no role", hint=did_you_mean(text, known))
    return text


def _message(row: Row, message: Any, where: str, known: Sequence[str]) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise row.error(f"`{where}` is {kind(message)}, not an object")
    given = {key: value for key, value in message.items() if value is not None}
    role = require_role(row, given.get("role"), f"{where}.role", known)
    if given.get("tool_calls"):
        if role != "assistant":
            raise row.error(f"`{where}` calls a tool, but its role is {role!r}, not 'assistant'")
        given["tool_calls"] = _calls(row, given["tool_calls"], f"{where}.tool_calls")
        if "content" not in given:
            return given
    given["content"] = _content(row, given.get("content"), f"{where}.content")
    return given


def _content(row: Row, content: Any, where: str) -> str:
    """Text, or the texts of a list of parts joined."""
    if not isinstance(content, list):
        return require_text(row, content, f"`{where}`")
    texts = []
    for index, part in enumerate(content):
        what = part.get("type") if isinstance(part, dict) else kind(part)
        if what != "text":
            raise row.error(f"`{where}[{index}]` is of type {what!r}; only 'text' can be read")
        texts.append(require_text(row, part.get("text"), f"`{where}[{index}].text`"))
    return "".join(texts)


def _calls(row: Row, calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise row.error(f"`{where}` is {kind(calls)}, not a list")
    return [_call(row, call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _call(row: Row, call: Any, where: str) -> dict[str, Any]:
    """A call whose arguments are an object, as chat templates want them; OpenAI writes JSON."""
    if not isinstance(call, dict):
        raise row.error(f"`{where}` is {kind(call)}, not an object")
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call(row, call["function"], f"{where}.function")}
    require_text(row, call.get("name"), f"`{where}.name`")
    arguments = _parsed(row, call.get("arguments", {}), f"{where}.arguments")
    if not isinstance(arguments, dict):
        raise row.error(f"`{where}.arguments` is {kind(arguments)}, not an object")
    return {**call, "arguments": arguments}


def _parsed(row: Row, value: Any, where: str) -> Any:
    """JSON as text, as tables have to hold what has no fixed keys, or the value itself."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise row.error(f"`{where}` is not JSON: {error}") from error


def _is_trained(row: Row, message: Mapping[str, Any], index: int) -> bool:
    """`train`, or OpenAI's `weight`, which is 0 or 1."""
    train, weight = message.get("train", True), message.get("weight", 1)
    if not isinstance(train, bool):
        raise row.error(f"`train` of message {index} is {kind(train)}, not true or false")
    if isinstance(weight, bool) or weight not in (0, 1):
        raise row.error(f"`weight` of message {index} is {weight!r}, neither 0 nor 1")
    return train and weight == 1


def _extra(row: Row) -> dict[str, Any]:
    extra = {key: row.value[key] for key in _TEMPLATE_KEYS if row.value.get(key) is not None}
    if "tools" in extra:
        extra["tools"] = _parsed(row, extra["tools"], "tools")
        if not isinstance(extra["tools"], list):
            raise row.error(f"`tools` is {kind(extra['tools'])}, not a list")
    more = row.value.get("chat_template_kwargs") or {}
    if not isinstance(more, dict):
        raise row.error("`chat_template_kwargs` is not an object")
    for key in sorted(RESERVED.intersection(more)):
        raise row.error(
            f"`chat_template_kwargs` has {key!r}, which is no variable of the template",
            hint="leave it out of the row",
        )
    return {**more, **extra}

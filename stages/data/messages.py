"""Conversations: lists of messages as OpenAI writes them, with tools, or as ShareGPT does; and the
names that a file has for keys and roles."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline import Problem
from pipeline.utils import closest, did_you_mean
from stages.data.rows import Row, children, kind, parsed_json, require, require_text

Messages = Sequence[Mapping[str, Any]]
ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant's thoughts, by the templates that read them."""
CALLS = ("tool_calls", "function_call")
RESERVED = frozenset({
    "conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message",
    "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "strftime_now",
})  # fmt: skip
"""Names that have a meaning for `apply_chat_template` or its template; rows may not set them."""
_CALL = "function_call"
"""ShareGPT's name of the assistant where it calls a tool."""
_SHAREGPT_ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "model": "assistant", "observation": "tool", "function_response": "tool",
}  # fmt: skip
_ARGUMENTS = ("tools", "documents", "chat_template_kwargs")
_LISTS = ("messages", "conversations", "prompt", "completion")
"""Keys of a row that may hold messages."""
_ROW = (
    *_LISTS, *_ARGUMENTS, "system", "instruction", "input", "output", "history", "text",
    "input_ids", "labels", "loss_mask", "attention_mask",
)  # fmt: skip
"""Keys of a row that mean something."""
_MESSAGE = (
    "role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "train", "weight",
    "from", "value",
)  # fmt: skip
"""Keys of a message that mean something, ShareGPT's among them; templates may know others."""


@dataclass(frozen=True, kw_only=True)
class Names:
    """A file's names of keys and roles."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Key that is read, of a row or a message -> its name in the file."""
    role_names: Mapping[str, str] = field(default_factory=dict)
    """Role in the file -> role that is meant."""
    roles: Sequence[str] = ()
    """Further roles that the template knows."""

    def row(self, row: Row) -> Row:
        """Return a row with the keys that are read, without the nulls inside of its values."""
        value = self.renamed(row.value)
        plain = {key: _without_nulls(each) for key, each in value.items()}
        if plain == value:
            return dataclasses.replace(row, value=plain, nulls="")
        # The first null that templates would be given: within tools, calls and the like. A null in
        # a message itself, or in the parts of its content, means that there is no such key.
        nulls, contents = "", {self.columns.get(key, key) for key in ("content", "value")}
        left = [(key, value[key]) for key in _ARGUMENTS if key in value]
        for key in _LISTS:
            found = value.get(key)
            messages = children(key, found) if isinstance(found, list) else [(key, found)]
            for place, message in messages:
                if isinstance(message, dict):
                    inside = {name: each for name, each in message.items() if name not in contents}
                    left += children(place, inside)
        left = [each for each in reversed(left) if each[1] is not None]
        while left and not nulls:
            place, inner = left.pop()
            below = list(children(place, inner))
            if isinstance(inner, dict):
                nulls = next((name for name, each in below if each is None), "")
            left += reversed(below)
        return dataclasses.replace(row, value=plain, nulls=nulls)

    def renamed(self, value: dict[str, Any], known: Sequence[str] = _ROW) -> dict[str, Any]:
        """Return a row's value, or a message, with the `known` keys; what has the name of a key
        that another one stands for is left out."""
        names = {key: name for key, name in self.columns.items() if key in known}
        if not names:
            return value
        taken = {*names, *names.values()}
        kept = {key: each for key, each in value.items() if key not in taken}
        return kept | {key: value[name] for key, name in names.items() if name in value}


def _without_nulls(value: Any) -> Any:
    """Return a value without the nulls of its objects: tables, and JSON that was written from
    them, give every object of a column all the keys that any row has."""
    if isinstance(value, dict):
        return {key: _without_nulls(child) for key, child in value.items() if child is not None}
    return [_without_nulls(child) for child in value] if isinstance(value, list) else value


def name_problems(names: Names) -> Iterator[Problem]:
    """Yield mistakes in `columns` and `role_names`."""
    known = (*_ROW, *_MESSAGE)
    for key in names.columns:
        if key not in known:
            message = "is not a key of a row or a message"
            yield Problem(message=message, key=f"columns.{key}", hint=did_you_mean(key, known))
    for level in (_ROW, _MESSAGE):
        seen: dict[str, str] = {}
        for key, name in names.columns.items():
            if key in level and seen.setdefault(name, key) != key:
                message = f"{name!r} is `{seen[name]}` already"
                yield Problem(message=message, key=f"columns.{key}")
    roles = (*ROLES, _CALL, *names.roles)
    for name, role in names.role_names.items():
        if role not in roles:
            more = "" if closest(role, roles) else "; `roles` adds others"
            hint = did_you_mean(role, roles) + more
            yield Problem(message=f"{role!r} is not a role", key=f"role_names.{name}", hint=hint)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages for the chat template."""

    row: Row
    messages: Messages
    first: int = 0
    """Index of the first message after the row's prompt; 0 without a prompt."""
    silent: frozenset[int] = frozenset()
    """Indices of messages that are never trained on."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template: `tools`, `documents`, and the entries of the row's
    `chat_template_kwargs`."""
    rendered: dict[tuple[int, bool], str] = field(init=False, default_factory=dict, compare=False)
    """Known texts of its first messages, by number and whether a generation prompt follows."""

    def assistant_turns(self) -> list[int]:
        """Return the indices of the assistant's messages."""
        return [index for index, each in enumerate(self.messages) if each["role"] == "assistant"]


def says_nothing(message: Mapping[str, Any]) -> bool:
    """Whether a message has neither content, as text or in parts, nor calls nor thoughts."""
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    values = [message.get(key) for key in (*CALLS, *REASONING)]
    texts += [value if isinstance(value, str) else repr(value) for value in values if value]
    return not any(text.strip() for text in texts)


def read_sharegpt(row: Row, names: Names) -> Conversation:
    """Read a row with `conversations`, a list of {from, value}, and optionally a `system` text.
    Entries of {role, content} are accepted as messages. Raises DataError for a mistake in it."""
    entries = listed(row, row.value["conversations"], "conversations")
    if isinstance(entries, list):
        entries = [
            _from_sharegpt(row, entry, f"conversations[{index}]", names)
            for index, entry in enumerate(entries)
        ]
        names = Names(roles=names.roles)  # what was read has the names that are meant
    turns = checked(row, entries, "conversations", names)
    return conversation(row, [*system_message(row), *turns])


def system_message(row: Row) -> list[dict[str, Any]]:
    """Return the row's `system` text as a list of one message; an empty list without one."""
    given = row.value.get("system")
    if given in (None, ""):
        return []
    return [{"role": "system", "content": require_text(row, given, "`system`")}]


def conversation(row: Row, messages: Messages, *, first: int = 0) -> Conversation:
    """Return `checked` messages as a conversation, with the row's arguments of the chat template.
    The keys that decide whether a message is trained on are removed from the messages."""
    extra: dict[str, Any] = {}
    for key in ("tools", "documents"):
        found = listed(row, row.value.get(key), key)
        if found is not None:
            extra[key] = require(row, found, list, f"`{key}`")
    more = row.value.get("chat_template_kwargs") or {}
    more = parsed_json(row, more, "chat_template_kwargs") or {}
    require(row, more, dict, "`chat_template_kwargs`")
    for key in sorted(RESERVED.intersection(more)):
        message = f"`chat_template_kwargs` has {key!r}, which is not a variable of the template"
        raise row.error(message, hint="leave it out of the row")
    extra = {**more, **extra}
    if "tools" not in extra and any(message.get("tool_calls") for message in messages):
        raise row.error(
            "calls a tool, but has no `tools`",
            hint="give the row the `tools` that may be called; use `tools: []` if the messages "
            "describe them",
        )
    silent = frozenset(i for i, message in enumerate(messages) if not message.get("train", True))
    plain = [{k: v for k, v in m.items() if k not in ("train", "weight")} for m in messages]
    return Conversation(row=row, messages=plain, first=first, silent=silent, extra=extra)


def checked(row: Row, messages: Any, key: str, names: Names) -> list[dict[str, Any]]:
    """Return the list of messages under `key` with content as text and the arguments of calls as
    objects. Raises DataError for a mistake, such as a role that is not known."""
    messages = listed(row, messages, key)
    if not isinstance(messages, list) or not messages:
        raise row.error(f"`{key}` is not a list of messages, or an empty one")
    return [_message(row, each, f"{key}[{index}]", names) for index, each in enumerate(messages)]


def listed(row: Row, value: Any, where: str) -> Any:
    """Return a list of objects that is written in another way as a list: as JSON text, or as an
    object of lists, one for each key, as `datasets` writes sequences of objects; None for an empty
    text, which says so in tables. Other values are returned as they are. Raises DataError for text
    that is not JSON, and lists of other lengths."""
    if isinstance(value, str):
        if value.strip() not in ("", "null") and value.lstrip()[0] not in "[{":
            raise row.error(f"`{where}` is text, not a list")
        value = parsed_json(row, value, where) if value.strip() else None
    if not isinstance(value, dict) or not value:
        return value
    if not all(isinstance(each, list) for each in value.values()):
        return value
    if len({len(each) for each in value.values()}) > 1:
        each = ", ".join(f"{len(each)} of {key!r}" for key, each in value.items())
        raise row.error(f"`{where}` holds lists of different lengths: {each}")
    found = [dict(zip(value, each, strict=True)) for each in zip(*value.values(), strict=True)]
    return [{key: each for key, each in one.items() if each is not None} for one in found]


def _message(row: Row, message: Any, where: str, names: Names) -> dict[str, Any]:
    require(row, message, dict, f"`{where}`")
    named = names.renamed(message, _MESSAGE)
    given = {key: value for key, value in named.items() if value is not None}
    role = given["role"] = _role(row, given.get("role"), f"{where}.role", names)
    train, weight = given.get("train", True), given.get("weight", 1)
    require(row, train, bool, f"`{where}.train`")
    if isinstance(weight, bool) or weight not in (0, 1):
        raise row.error(f"`{where}.weight` is {weight!r}, neither 0 nor 1")
    given["train"] = bool(train and weight == 1)
    if "tool_calls" in given:
        given["tool_calls"] = listed(row, given["tool_calls"], f"{where}.tool_calls")
    if given.get("tool_calls"):
        if role != "assistant":
            raise row.error(f"`{where}` calls a tool, but its role is {role!r}, not 'assistant'")
        calls = require(row, given["tool_calls"], list, f"`{where}.tool_calls`")
        given["tool_calls"] = [
            _call(row, call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    if role == "assistant":
        thoughts = {key: given[key] for key in REASONING if isinstance(given.get(key), str)}
        thoughts = {key: text.strip() for key, text in thoughts.items() if text.strip()}
        if len({*thoughts.values()}) > 1:  # templates read one
            keys = " and ".join(f"`{key}`" for key in thoughts)
            raise row.error(
                f"`{where}` has different thoughts under {keys}", hint="leave one of them"
            )
        if "content" not in given and any(given.get(key) for key in (*CALLS, *REASONING)):
            return given
    given["content"] = _content(row, given.get("content"), f"{where}.content")
    return given


def _from_sharegpt(row: Row, entry: Any, where: str, names: Names) -> Any:
    """Return a ShareGPT entry as a message; a `function_call` is JSON, a call or a list of them."""
    if not isinstance(entry, dict):
        return entry
    entry = names.renamed(entry, _MESSAGE)
    if "from" not in entry:
        role = entry.get("role")
        return {**entry, "role": names.role_names.get(role, role)} if type(role) is str else entry
    name = _role(row, entry.get("from"), f"{where}.from", names, (*_SHAREGPT_ROLES, _CALL))
    text = require_text(row, entry.get("value"), f"`{where}.value`")
    kept = {key: entry[key] for key in ("train", "weight") if entry.get(key) is not None}
    if name != _CALL:
        return {"role": _SHAREGPT_ROLES.get(name, name), "content": text, **kept}
    found = parsed_json(row, text, f"{where}.value")
    calls = found if isinstance(found, list) else [found]
    functions = [{"type": "function", "function": call} for call in calls]
    return {"role": "assistant", "tool_calls": functions, **kept}


def _role(row: Row, role: Any, where: str, names: Names, more: Sequence[str] = ()) -> str:
    """Return the role that is meant by a name, one of the known ones or of `more`."""
    text = require_text(row, role, f"`{where}`")
    text = names.role_names.get(text, text)
    known = (*more, *ROLES, *names.roles)
    if text not in known:
        message = f"`{where}` is {text!r}, which is not a known role"
        raise row.error(message, hint=did_you_mean(text, known))
    return text


def _content(row: Row, content: Any, where: str) -> str:
    """Return text, or the joined texts of a list of parts."""
    content = listed(row, content, where) if isinstance(content, dict) else content
    if not isinstance(content, list):
        return require_text(row, content, f"`{where}`")
    texts = []
    for index, part in enumerate(content):
        found = part.get("type") if isinstance(part, dict) else kind(part)
        if found != "text":
            raise row.error(f"`{where}[{index}]` is of type {found!r}; only 'text' can be read")
        texts.append(require_text(row, part.get("text"), f"`{where}[{index}].text`"))
    return "".join(texts)


def _call(row: Row, call: Any, where: str) -> dict[str, Any]:
    """Return a call whose arguments are an object; OpenAI writes them as JSON text."""
    require(row, call, dict, f"`{where}`")
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call(row, call["function"], f"{where}.function")}
    require_text(row, call.get("name"), f"`{where}.name`")
    given = call.get("arguments", {})
    # APIs write an empty text where a function takes none.
    arguments = {} if given == "" else parsed_json(row, given, f"{where}.arguments")
    return {**call, "arguments": require(row, arguments, dict, f"`{where}.arguments`")}

"""Conversations: lists of messages as OpenAI writes them, with tools, or as ShareGPT does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.utils import did_you_mean
from stages.data.marks import REASONING
from stages.data.names import CALL, ROLES, Names
from stages.data.rows import Row, kind, parsed_json, require, require_text

RESERVED = frozenset({
    "conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message",
    "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "strftime_now",
})  # fmt: skip
"""Names that have a meaning for `apply_chat_template` or its template; rows may not set them."""
_SHAREGPT_ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "model": "assistant", "observation": "tool", "function_response": "tool",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages for the chat template."""

    row: Row
    messages: Sequence[Mapping[str, Any]]
    first: int = 0
    """Index of the first message after the row's prompt; 0 without a prompt."""
    silent: frozenset[int] = frozenset()
    """Indices of messages that are never trained on."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template: `tools`, `documents`, and the entries of the row's
    `chat_template_kwargs`."""

    def texts(self) -> list[Any]:
        """Return the row's own texts, which should not spell a special token."""
        return [*self.messages, self.extra]

    def until(self, index: int) -> Conversation:
        """Return the conversation up to a message, of which that message alone is trained on."""
        return replace(
            self,
            messages=self.messages[: index + 1],
            first=min(self.first, index),
            silent=frozenset(range(index)),
        )

    def assistant_turns(self) -> list[int]:
        """Return the indices of the assistant's messages."""
        return [index for index, each in enumerate(self.messages) if each["role"] == "assistant"]


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


def conversation(
    row: Row, messages: Sequence[Mapping[str, Any]], *, first: int = 0
) -> Conversation:
    """Return `checked` messages as a conversation, with the row's arguments of the chat template.
    The keys that decide whether a message is trained on are removed from the messages."""
    extra = _template_arguments(row)
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
    object of lists, one for each key, as `datasets` writes sequences of objects. Other values are
    returned as they are. Raises DataError for text that is no JSON, and lists of other lengths."""
    if isinstance(value, str):
        if value.strip() not in ("", "null") and value.lstrip()[0] not in "[{":
            raise row.error(f"`{where}` is text, not a list")
        value = parsed_json(row, value, where)
    if not isinstance(value, dict) or not value:
        return value
    if not all(isinstance(each, list) for each in value.values()):
        return value
    lengths = {key: len(each) for key, each in value.items()}
    if len(set(lengths.values())) > 1:
        each = ", ".join(f"{count} of {key!r}" for key, count in lengths.items())
        raise row.error(f"`{where}` holds lists of different lengths: {each}")
    found = [dict(zip(value, each, strict=True)) for each in zip(*value.values(), strict=True)]
    return [{key: each for key, each in one.items() if each is not None} for one in found]


def _message(row: Row, message: Any, where: str, names: Names) -> dict[str, Any]:
    require(row, message, dict, f"`{where}`")
    given = {key: value for key, value in names.message(message).items() if value is not None}
    role = given["role"] = _role(row, given.get("role"), f"{where}.role", names)
    given["train"] = _is_trained(row, given, where)
    if "tool_calls" in given:
        given["tool_calls"] = _or_none(row, given["tool_calls"], f"{where}.tool_calls")
    if given.get("tool_calls"):
        if role != "assistant":
            raise row.error(f"`{where}` calls a tool, but its role is {role!r}, not 'assistant'")
        calls = require(row, given["tool_calls"], list, f"`{where}.tool_calls`")
        given["tool_calls"] = [
            _call(row, call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    if role == "assistant":
        _require_one_key_of_thoughts(row, given, where)
    says = ("tool_calls", "function_call", *REASONING)
    if "content" not in given and role == "assistant" and any(given.get(key) for key in says):
        return given
    given["content"] = _content(row, given.get("content"), f"{where}.content")
    return given


def _require_one_key_of_thoughts(row: Row, message: Mapping[str, Any], where: str) -> None:
    """Raise DataError for a message with other thoughts under another key: templates read one."""
    texts = {key: message[key].strip() for key in REASONING if isinstance(message.get(key), str)}
    keys = [key for key, text in texts.items() if text]
    if len({texts[key] for key in keys}) > 1:
        named = " and ".join(f"`{key}`" for key in keys)
        raise row.error(f"`{where}` has different thoughts under {named}", hint="leave one of them")


def _from_sharegpt(row: Row, entry: Any, where: str, names: Names) -> Any:
    """Return a ShareGPT entry as a message; a `function_call` is JSON, a call or a list of them."""
    if not isinstance(entry, dict):
        return entry
    entry = names.message(entry)
    if "from" not in entry:
        role = entry.get("role")
        return {**entry, "role": names.role_names.get(role, role)} if type(role) is str else entry
    name = _role(row, entry.get("from"), f"{where}.from", names, (*_SHAREGPT_ROLES, CALL))
    text = require_text(row, entry.get("value"), f"`{where}.value`")
    kept = {key: entry[key] for key in ("train", "weight") if entry.get(key) is not None}
    if name != CALL:
        return {"role": _SHAREGPT_ROLES.get(name, name), "content": text, **kept}
    found = _parsed(row, text, f"{where}.value")
    calls = found if isinstance(found, list) else [found]
    functions = [{"type": "function", "function": call} for call in calls]
    return {"role": "assistant", "tool_calls": functions, **kept}


def _role(row: Row, role: Any, where: str, names: Names, more: Sequence[str] = ()) -> str:
    """Return the role that is meant by a name, one of the known ones or of `more`."""
    text = require_text(row, role, f"`{where}`")
    text = names.role_names.get(text, text)
    known = (*more, *ROLES, *names.roles)
    if text not in known:
        hint = did_you_mean(text, known) or "`role_names` says which role is meant by a name"
        raise row.error(f"`{where}` is {text!r}, which is not a known role", hint=hint)
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
    """Return a call whose arguments are an object, as chat templates expect; OpenAI writes them as
    JSON text."""
    require(row, call, dict, f"`{where}`")
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call(row, call["function"], f"{where}.function")}
    require_text(row, call.get("name"), f"`{where}.name`")
    given = call.get("arguments", {})
    # APIs write an empty text where a function takes none.
    arguments = {} if given == "" else _parsed(row, given, f"{where}.arguments")
    return {**call, "arguments": require(row, arguments, dict, f"`{where}.arguments`")}


def _parsed(row: Row, value: Any, where: str) -> Any:
    """Return a value, parsed if it is JSON text: tables hold objects without fixed keys so."""
    return parsed_json(row, value, where) if isinstance(value, str) else value


def _or_none(row: Row, value: Any, where: str) -> Any:
    """Return a list as `listed` does; None for an empty text, and for the text of a null, with
    which tables say that there is nothing."""
    return None if isinstance(value, str) and not value.strip() else listed(row, value, where)


def _is_trained(row: Row, message: Mapping[str, Any], where: str) -> bool:
    """Return the message's `train`, and OpenAI's `weight`, which is 0 or 1."""
    train, weight = message.get("train", True), message.get("weight", 1)
    require(row, train, bool, f"`{where}.train`")
    if isinstance(weight, bool) or weight not in (0, 1):
        raise row.error(f"`{where}.weight` is {weight!r}, neither 0 nor 1")
    return bool(train and weight == 1)


def _template_arguments(row: Row) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    for key in ("tools", "documents"):
        found = _or_none(row, row.value.get(key), key)
        if found is not None:
            extra[key] = require(row, found, list, f"`{key}`")
    more = _parsed(row, row.value.get("chat_template_kwargs") or {}, "chat_template_kwargs") or {}
    require(row, more, dict, "`chat_template_kwargs`")
    for key in sorted(RESERVED.intersection(more)):
        raise row.error(
            f"`chat_template_kwargs` has {key!r}, which is not a variable of the template",
            hint="leave it out of the row",
        )
    return {**more, **extra}

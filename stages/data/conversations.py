"""Rows of chat data, checked: messages, or a prompt with its completion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.data.sources import Row, objects, require_text

_TEMPLATE_KEYS = ("tools", "documents")
_FORMS = "one of: `messages`; `prompt` and `completion`"


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages for the chat template. Assistant messages from `first` on are trained on."""

    row: Row
    messages: Sequence[Mapping[str, Any]]
    first: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of the chat template: `tools`, `documents`, and what the row has under
    `chat_template_kwargs`."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A prompt and the text behind it, which is trained on; no chat template."""

    row: Row
    prompt: str
    completion: str


def read(paths: Iterable[Path], *, template: bool) -> Iterator[Conversation | Completion]:
    """The rows of files in order. Text pairs become conversations of two turns if `template`.

    Raises DataError for a row that has neither form, or another than the first row of its file.
    """
    for path in paths:
        first: str | None = None
        empty = True
        for row in objects(path):
            empty = False
            form = _form(row)
            first = first or form
            if form != first:
                raise row.error(f"a row of form {form!r} in a file of {first!r} rows")
            yield _messages(row) if form == "messages" else _pair(row, template=template)
        if empty:
            raise Row(file=path, number=1, value=None).error("no row in this file")


def _form(row: Row) -> str:
    has = {key for key in ("messages", "prompt", "completion") if row.value.get(key) is not None}
    if has == {"messages"}:
        return "messages"
    if has == {"prompt", "completion"}:
        return "prompt/completion"
    raise row.error(f"has {sorted(has) or sorted(row.value)}", hint=f"a row has {_FORMS}")


def _messages(row: Row) -> Conversation:
    messages = _checked(row, row.value["messages"], "messages")
    return Conversation(row=row, messages=messages, extra=_extra(row))


def _pair(row: Row, *, template: bool) -> Conversation | Completion:
    prompt, completion = row.value["prompt"], row.value["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = _checked(row, prompt, "prompt")
        messages = [*before, *_checked(row, completion, "completion")]
        return Conversation(row=row, messages=messages, first=len(before), extra=_extra(row))
    require_text(row, prompt, "`prompt`")
    require_text(row, completion, "`completion`")
    if not template:
        return Completion(row=row, prompt=prompt, completion=completion)
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    return Conversation(row=row, messages=turns, extra=_extra(row))


def _extra(row: Row) -> dict[str, Any]:
    extra = {key: row.value[key] for key in _TEMPLATE_KEYS if row.value.get(key) is not None}
    more = row.value.get("chat_template_kwargs") or {}
    if not isinstance(more, dict):
        raise row.error("`chat_template_kwargs` is not an object")
    return {**more, **extra}


def _checked(row: Row, messages: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise row.error(f"`{key}` is not a list of messages, or an empty one")
    for index, message in enumerate(messages):
        _check_message(row, message, f"{key}[{index}]")
    # A table column holds None for every key that only other rows have.
    return [{key: value for key, value in m.items() if value is not None} for m in messages]


def _check_message(row: Row, message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise row.error(f"{where} is a {type(message).__name__}, not an object")
    require_text(row, message.get("role"), f"`{where}.role`")
    if message.get("content") is None and message.get("tool_calls"):
        return
    require_text(row, message.get("content"), f"`{where}.content`")

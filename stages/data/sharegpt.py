"""Conversations in ShareGPT's form: a list of {from, value}."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from stages.data.messages import ROLES, Conversation, checked, conversation, require_role
from stages.data.rows import Row, kind, require_text

USUAL = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "model": "assistant", "observation": "tool", "function_response": "tool",
}  # fmt: skip
"""Names that data sets use beside the roles' own."""
_CALL = "function_call"
_KEPT = ("train", "weight")


def item(row: Row, roles: Sequence[str]) -> Conversation:
    """A row with `conversations`, and perhaps a `system` text. Raises DataError for what is wrong
    in it. Entries of {role, content} are messages already."""
    entries = row.value["conversations"]
    if isinstance(entries, list) and not any(_is_entry(entry) for entry in entries):
        turns = checked(row, entries, "conversations", roles)
    else:
        renamed = _renamed(row, entries, roles)
        turns = checked(row, renamed, "conversations", roles)
    return conversation(row, [*system(row), *turns])


def system(row: Row) -> list[dict[str, Any]]:
    """The row's `system` text as a message, if it has one."""
    given = row.value.get("system")
    if given is None or given == "":
        return []
    return [{"role": "system", "content": require_text(row, given, "`system`")}]


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and ("from" in entry or "value" in entry)


def _renamed(row: Row, entries: Any, roles: Sequence[str]) -> Any:
    if not isinstance(entries, list):
        return entries
    known = (*USUAL, _CALL, *ROLES, *roles)
    return [_message(row, each, f"conversations[{i}]", known) for i, each in enumerate(entries)]


def _message(row: Row, entry: Any, where: str, known: Sequence[str]) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise row.error(f"`{where}` is {kind(entry)}, not an object")
    name = require_role(row, entry.get("from"), f"{where}.from", known)
    said = require_text(row, entry.get("value"), f"`{where}.value`")
    kept = {key: entry[key] for key in _KEPT if entry.get(key) is not None}
    if name == _CALL:
        return {"role": "assistant", "tool_calls": _calls(row, said, where), **kept}
    return {"role": USUAL.get(name, name), "content": said, **kept}


def _calls(row: Row, said: str, where: str) -> list[dict[str, Any]]:
    """The calls that a `function_call` entry writes as JSON: one object or a list of them."""
    try:
        calls = json.loads(said)
    except (ValueError, RecursionError) as error:
        raise row.error(f"`{where}.value` is not JSON: {error}") from error
    return [
        {"type": "function", "function": call}
        for call in (calls if isinstance(calls, list) else [calls])
    ]

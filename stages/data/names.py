"""Names of keys and roles in a file, and nulls that stand for keys which a row does not have."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline import Problem
from pipeline.utils import did_you_mean
from stages.data.rows import Row, children

ROLES = ("system", "developer", "user", "assistant", "tool")
CALL = "function_call"
"""ShareGPT's name of the assistant where it calls a tool."""
_ARGUMENTS = ("tools", "documents", "chat_template_kwargs")
_LISTS = ("messages", "conversations", "prompt", "completion")
"""Keys of a row that may hold messages."""
ROW = (
    *_LISTS, *_ARGUMENTS, "system", "instruction", "input", "output", "history", "text",
    "input_ids", "labels", "loss_mask", "attention_mask",
)  # fmt: skip
"""Keys of a row that mean something."""
MESSAGE = (
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
    """Roles that the template knows besides ROLES."""

    def row(self, row: Row) -> Row:
        """Return a row with the keys that are read, without the nulls inside of its values."""
        value = self.renamed(row.value)
        plain = {key: _without_nulls(each) for key, each in value.items()}
        found = ""
        if plain != value:
            found = next(_nulls(value, {self.of("content"), self.of("value")}), "")
        return dataclasses.replace(row, value=plain, nulls=found)

    def renamed(self, value: dict[str, Any]) -> dict[str, Any]:
        """Return a row's value with the keys that are read."""
        return _renamed(value, {k: v for k, v in self.columns.items() if k in ROW})

    def message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with the keys that are read."""
        return _renamed(message, {k: v for k, v in self.columns.items() if k in MESSAGE})

    def of(self, key: str) -> str:
        """Return the file's name of a key."""
        return self.columns.get(key, key)


def _renamed(value: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return an object with its keys renamed; what has the name of a key that another one stands
    for is left out."""
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


def _nulls(row: dict[str, Any], contents: set[str]) -> Iterator[str]:
    """Yield the places of nulls that templates would be given: within tools, calls and the like.
    A null in a message itself, or in the parts of its content (under one of the keys `contents`),
    means that there is no such key."""
    left = [(key, row[key]) for key in _ARGUMENTS if key in row]
    for key in _LISTS:
        found = row.get(key)
        for place, message in children(key, found) if isinstance(found, list) else [(key, found)]:
            if isinstance(message, dict):
                left += [
                    (f"{place}.{name}", each)
                    for name, each in message.items()
                    if name not in contents
                ]
    left = [each for each in reversed(left) if each[1] is not None]
    while left:
        place, value = left.pop()
        inside = list(children(place, value))
        if isinstance(value, dict):
            yield from (inner for inner, each in inside if each is None)
        left += reversed(inside)


def name_problems(names: Names) -> Iterator[Problem]:
    """Yield mistakes in `columns` and `role_names`."""
    for key in names.columns:
        if key not in (*ROW, *MESSAGE):
            message = "is not a key of a row or a message"
            hint = did_you_mean(key, (*ROW, *MESSAGE)) or f"known: {', '.join((*ROW, *MESSAGE))}"
            yield Problem(message=message, key=f"columns.{key}", hint=hint)
    for level in (ROW, MESSAGE):
        seen: dict[str, str] = {}
        for key, name in names.columns.items():
            if key in level and name in seen:
                message = f"{name!r} is `{seen[name]}` already"
                yield Problem(message=message, key=f"columns.{key}")
            elif key in level:
                seen[name] = key
    known = (*ROLES, CALL, *names.roles)
    for name, role in names.role_names.items():
        if role not in known:
            hint = did_you_mean(role, known) or f"known: {', '.join(known)}; `roles` adds others"
            yield Problem(message=f"{role!r} is not a role", key=f"role_names.{name}", hint=hint)

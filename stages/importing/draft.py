"""The recipe while it is being written, with the facts that its values come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeline.marks import Path as Keys
from stages.importing.account import Account


class Draft:
    """Recipe values by dotted key (`train.steps`; slots stand at the top, as in overrides)."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.header: dict[str, Any] = {}
        self.slots: dict[str, dict[str, Any]] = {}
        self.notes: dict[Keys, str] = {}
        self.missing: dict[str, str] = {}

    def slot(self, name: str, use: str) -> None:
        """A slot, behind those that are there."""
        self.slots[name] = {"use": use}

    def put(self, key: str, value: Any, *facts: str, note: str = "") -> None:
        """Say `value` at `key`, which follows from `facts`."""
        slot, *inner = key.split(".")
        path = ("stages", slot, *inner) if slot in self.slots else (slot, *inner)
        block = self.slots if slot in self.slots else self.header
        for part in (slot, *inner)[:-1]:
            block = block.setdefault(part, {})
        block[(slot, *inner)[-1]] = value
        for fact in facts:
            for entry in self.account.of(fact):
                entry.to[key] = value
        text = note or self._origin(facts)
        if text:
            self.notes[path] = text

    def copy(self, fact: str, key: str, read: Callable[[Any], Any] = lambda value: value) -> None:
        """Say a fact at `key`, if there is one."""
        if self.account.says(fact):
            self.put(key, read(self.account.value(fact)), fact)

    def lacks(self, key: str, what: str) -> None:
        """A field that the person has to fill in."""
        slot, _, field = key.partition(".")
        self.missing[key] = what
        path: Keys = ("stages", slot, "use")
        before = f"{self.notes[path]}; " if path in self.notes else ""
        self.notes[path] = f"{before}fill in `{field}`: {what}"

    def _origin(self, facts: tuple[str, ...]) -> str:
        entries = [entry for fact in facts for entry in self.account.of(fact)]
        plain = [f"{entry.key} in {entry.file}" for entry in entries]
        if plain:
            return ", ".join(dict.fromkeys(plain))
        return next((self.account.assumed[f][1] for f in facts if f in self.account.assumed), "")

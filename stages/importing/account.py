"""What the files say, and what has become of each of their keys so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.importing.translator import Fate
from pipeline.suggest import did_you_mean
from stages.importing.foreign import METHOD
from stages.importing.rules import UNSET, Auto, Table, Verdict, judge

LEFT_OVER = "has no place in this recipe"


@dataclass(kw_only=True)
class Entry:
    """A key of a file, the verdict on it, and where the recipe says it."""

    file: str
    key: str
    value: Any
    verdict: Verdict
    to: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    """More than the verdict says."""

    def fate(self) -> Fate:
        """How it ended."""
        verdict = self.verdict
        if verdict.outcome == "translated" and not self.to:
            verdict = Verdict(outcome="refused", why=LEFT_OVER)
        return Fate(
            file=self.file,
            key=self.key,
            value=self.value,
            outcome=verdict.outcome,
            to=self.to if verdict.outcome == "translated" else {},
            why="; ".join(part for part in (verdict.why, self.why) if part),
            hint=verdict.hint,
            blocks=verdict.blocks,
        )


class Account:
    """Every key of every file, and the facts that they give."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.assumed: dict[str, tuple[Any, str]] = {}
        self._facts: dict[str, list[Entry]] = {}

    def read(self, file: str, content: Mapping[str, Any], table: Table, prefix: str = "") -> None:
        """Judge every key of a file or block. Unknown keys are refused."""
        for key, value in content.items():
            rule = table.get(key)
            where = f"{prefix}{key}"
            if rule is None:
                hint = did_you_mean(key, table) if len(table) < 12 else _near(key, table)
                unknown = Verdict(
                    outcome="refused",
                    why="is no key that is known here",
                    hint=hint,
                    blocks=bool(value and METHOD.search(key)),
                )
                self.enter(file, where, value, unknown)
            elif callable(rule):
                self.enter(file, where, value, judge(rule, value))
            elif isinstance(value, Mapping) and value:
                self.read(file, value, rule, f"{where}.")
            else:
                self.enter(file, where, value, _no_block(value))

    def dismiss_all(self, file: str, content: Mapping[str, Any], prefix: str, why: str) -> None:
        """Every key of a block that does not count."""
        for key, value in content.items():
            self.enter(file, f"{prefix}{key}", value, Verdict(outcome="default", why=why))

    def enter(self, file: str, key: str, value: Any, verdict: Verdict) -> None:
        """Take down a verdict. A fact that another key has given otherwise is a contradiction."""
        entry = Entry(file=file, key=key, value=value, verdict=verdict)
        self.entries.append(entry)
        if verdict.outcome != "translated":
            return
        for other in self._facts.get(verdict.fact, ()):
            known = other.verdict.value
            if Auto not in (type(known), type(verdict.value)) and known != verdict.value:
                entry.verdict = Verdict(
                    outcome="refused",
                    why=f"contradicts {other.key}: {other.value!r} in {other.file}",
                    hint="say the same in both",
                    blocks=True,
                )
                return
        self._facts.setdefault(verdict.fact, []).append(entry)

    def reconsider(self, file: str, key: str, verdict: Verdict) -> None:
        """Think better of a key that gives no fact."""
        for entry in self.entries:
            if (entry.file, entry.key) == (file, key):
                entry.verdict = verdict

    def assume(self, fact: str, value: Any, why: str) -> None:
        """What holds for a fact that no key gives."""
        self.assumed.setdefault(fact, (value, why))

    def says(self, fact: str) -> bool:
        """Whether some key gives the fact, or one is assumed."""
        return fact in self._facts or fact in self.assumed

    def given(self, fact: str) -> bool:
        """Whether some key gives the fact."""
        return fact in self._facts

    def value(self, fact: str, default: Any = None) -> Any:
        """The fact: as a key gives it, as assumed, or what `auto` falls back to."""
        entries = self._facts.get(fact, [])
        if any(not isinstance(entry.verdict.value, Auto) for entry in entries):
            return self.stated(fact)
        if fact in self.assumed:
            return self.assumed[fact][0]
        return entries[0].verdict.value.default if entries else default

    def stated(self, fact: str) -> Any:
        """The fact as a key gives it in so many words; None if none does."""
        values = [entry.verdict.value for entry in self.of(fact)]
        return next((value for value in values if not isinstance(value, Auto)), None)

    def fates(self) -> list[Fate]:
        """How every key ended, in the order in which they were read."""
        for entry in self.entries:
            if isinstance(entry.verdict.value, Auto) and entry.to:
                entry.why = self._automatic(entry.verdict.fact)
        return [entry.fate() for entry in self.entries]

    def _automatic(self, fact: str) -> str:
        for entry in self.of(fact):
            if not isinstance(entry.verdict.value, Auto):
                return f"auto: as {entry.key} in {entry.file}"
        return "auto: as transformers fills it in"

    def facts(self, prefix: str) -> dict[str, Any]:
        """Given facts whose names begin with `prefix`, without it."""
        return {
            fact.removeprefix(prefix): self.value(fact)
            for fact in self._facts
            if fact.startswith(prefix)
        }

    def of(self, fact: str) -> list[Entry]:
        """The keys that give the fact."""
        return self._facts.get(fact, [])

    def dismiss(self, fact: str, why: str) -> None:
        """Where the recipe has not said the fact, and not refused it, it need not be said."""
        for entry in self.of(fact):
            if not entry.to and entry.verdict.outcome == "translated":
                entry.verdict = replace(entry.verdict, outcome="default", why=why)

    def refuse(self, fact: str, why: str, hint: str = "", *, blocks: bool = False) -> None:
        """The recipe does not do it."""
        for entry in self.of(fact):
            entry.to.clear()
            entry.verdict = replace(
                entry.verdict, outcome="refused", why=why, hint=hint, blocks=blocks
            )


def _near(key: str, table: Table) -> str:
    hint = did_you_mean(key, table)
    return "" if hint.startswith("known here") else hint


def _no_block(value: Any) -> Verdict:
    if not value or value in ("no", "none", "auto"):
        return Verdict(outcome="default", why=UNSET)
    return Verdict(outcome="refused", why="must be a block of keys")

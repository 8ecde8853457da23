"""The facts that the files state, the outcome of each key, and the recipe that is made of them."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.importing import ConfigFile, KeyPath, Request, Translation
from stages.importing.rules import TABLES, Rule, RuleResult, is_off, outcome, parts, value_of, why

METHOD = re.compile(
    r"lora|adapter|peft|tuner|finetun|freeze|quanti|dpo|rlhf|reward|prefer|ref_model|teacher"
    r"|distill|parallel|megatron|(^|_)(tp|pp|cp|sp|ep)_size"
)
"""Names of keys that change the training method; one without a rule blocks the recipe."""
SECRET = re.compile(r"(hub|auth|access|api)_(token|key)$|password|secret")
"""Names of keys whose values are shown nowhere."""


class Rows(NamedTuple):
    """The rule of a key with a data set, or a list of them, each a block. `table` returns the rules
    of a block with its facts' beginning (`kind` and a number) and its name."""

    kind: str
    table: Callable[[Mapping[str, Any], str, str], Mapping[str, Any]]
    blocking: bool = False
    """Whether no recipe is written if one is not a block."""


class Draft:
    """Every key of every file, the facts that they state, and the recipe in the making. Its keys
    are dotted; slots stand at the top, as in overrides."""

    def __init__(self, files: Sequence[ConfigFile] = (), request: Request | None = None) -> None:
        self.files, self.request = files, request or Request()
        self.resolved = False
        """Whether references (`${...}`) were resolved; what is left is refused."""
        self.kinds: set[str] = set()
        """Kinds of files of accelerate, DeepSpeed and transformers that were read."""
        self.entries: list[RuleResult] = []
        self.defaults: dict[str, tuple[Any, str]] = {}
        """Fact -> value and reason, for facts that no key has to state."""
        self._facts: dict[str, list[RuleResult]] = {}
        self._sets = 0
        self.header: dict[str, Any] = {}
        self.slots: dict[str, dict[str, Any]] = {}
        self.notes: dict[KeyPath, str] = {}
        self.missing: dict[str, str] = {}

    def read(
        self, file: str, content: Mapping[str, Any], table: Mapping[str, Any], prefix: str = "",
        one: str = "",
    ) -> None:  # fmt: skip
        """Apply the table's rules to every key of a file or block; `*` has the rule of all keys
        that it does not name. `one` stands before the facts whose names begin with a dot."""
        for key, value in content.items():
            name, rule = f"{prefix}{key}", table.get(key, table.get("*"))
            if isinstance(rule, Rows) and value:
                for index, block in enumerate(value if isinstance(value, list) else [value]):
                    each = f"{name}[{index}]" if isinstance(value, list) else name
                    self._sets += 1
                    facts = f"{rule.kind}{self._sets}."
                    if isinstance(block, Mapping) and block:
                        self.read(file, block, rule.table(block, facts, each), f"{each}.", facts)
                        continue
                    wrong = outcome(why("off" if is_off(block) else "no_block"))
                    wrong.blocks = rule.blocking and not is_off(block)
                    self.enter(file, each, block, wrong)
            elif isinstance(rule, Mapping) and isinstance(value, Mapping) and value:
                self.read(file, value, rule, f"{name}.", one)
            else:
                result = self._result(key, value, rule, table)
                result.fact = re.sub(r"^\.", one, result.fact)
                self.enter(file, name, value, result)

    def _result(self, key: str, value: Any, rule: Any, known: Mapping[str, Any]) -> RuleResult:
        """Return what a rule says of a value, or what is said of a key without one."""
        found: RuleResult
        if self.resolved and isinstance(value, str) and "${" in value:
            return outcome(why("outside"))
        if rule is not None:
            off = is_off(value) or value == "auto"
            found = rule(value) if callable(rule) else outcome(why("off" if off else "no_block"))
            return found
        if is_off(value) or value == f"<{key.upper()}>":  # transformers writes this for a secret
            return outcome(why("off"))
        if SECRET.search(key):
            return outcome(why("secret", key.upper() if key.endswith("api_key") else "HF_TOKEN"))
        for beginning, general in TABLES["beginnings"].items():
            if key.removeprefix("fsdp_").startswith(beginning):
                found = general(value)
                return found
        similar = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        hint = f"did you mean `{similar[0]}`?" if similar else ""
        if METHOD.search(key):
            return outcome(why("unknown_method", hint).rstrip())
        return RuleResult(outcome="not translated", hint=hint)

    def enter(self, file: str, key: str, value: Any, entry: RuleResult) -> None:
        """Add a key. A fact that another key states with another value is a contradiction."""
        for other in self.of(entry.fact):
            if not (other.auto or entry.auto) and other.content != entry.content:
                entry = outcome(why("contradiction", other.key, other.value, other.file))
        entry.file, entry.key = file, key
        entry.value = "(hidden)" if SECRET.search(key) and value else value
        self.entries.append(entry)
        if entry.fact:
            self._facts.setdefault(entry.fact, []).append(entry)

    def default(self, fact: str, value: Any, reason: str, *, when: Any = True) -> None:
        """Set the value that holds where no key states one. The first default wins."""
        if when:
            self.defaults.setdefault(fact, (value, reason))

    def set_defaults(self, name: str, table: Mapping[str, Any], reason: str, *stated: str) -> None:
        """Set the values of `NAME-defaults`, but for keys that are stated, by the table's rules."""
        for key, text in TABLES[f"{name}-defaults"].items():
            what, _, own = parts(text)
            result = table.get(key, Rule(f"{key} := {what}"))(value_of(what))
            self.default(result.fact, result.content, own or reason, when=key not in stated)

    def given(self, fact: str) -> bool:
        """Return whether a key states the fact, also through `auto`."""
        return any(not entry.auto or entry.content is not None for entry in self.of(fact))

    def known(self, fact: str) -> bool:
        """Return whether the fact is stated or has a default."""
        return fact in self.defaults or self.given(fact)

    def facts(self, prefix: str) -> list[str]:
        """Return the facts whose names begin with `prefix`, sorted."""
        return sorted(f for f in {*self._facts, *self.defaults} if f.startswith(prefix))

    def of(self, fact: str) -> list[RuleResult]:
        """Return the keys that state the fact."""
        return self._facts.get(fact, [])

    def value(self, fact: str, otherwise: Any = None) -> Any:
        """Return the stated value, else the default, else the meaning of `auto`."""
        entries = sorted(self.of(fact), key=lambda entry: entry.auto)
        if fact in self.defaults and (not entries or entries[0].auto):
            return self.defaults[fact][0]
        content = entries[0].content if entries else None
        return otherwise if content is None else content

    def rename(self, fact: str, name: str, **changes: Any) -> None:
        """Give a fact the name, and with `content=` the value, that it has in company of others."""
        for entry in self._facts.pop(fact, []):
            vars(entry).update(changes, fact=name)
            self._facts.setdefault(name, []).append(entry)

    def drop(self, text: str, *facts: str, when: Any = True) -> None:
        """Forget facts that have no place in the recipe, with the outcome that the text says."""
        said = outcome(text)
        for fact in facts if when else ():
            self.defaults.pop(fact, None)
            for entry in self._facts.pop(fact, ()):
                entry.outcome, entry.why, entry.hint = said.outcome, said.why, said.hint
                entry.blocks, entry.to = said.blocks, {}

    def put(self, key: str, value: Any, *facts: str, note: str = "") -> None:
        """Set a value, which follows from `facts`, with a comment about its source; a slot begins
        with its `use`."""
        *outer, last = path = key.split(".")
        if last == "use":
            self.slots[outer[0]] = {}
        in_slot = path[0] in self.slots
        block = self.slots if in_slot else self.header
        for part in outer:
            block = block.setdefault(part, {})
        block[last] = copy.deepcopy(value)
        entries = [entry for fact in facts for entry in self.of(fact)]
        for entry in entries:
            entry.to[key] = value
        keys = dict.fromkeys(f"{entry.key} in {entry.file}" for entry in entries)
        reasons = (self.defaults[fact][1] for fact in facts if fact in self.defaults)
        if comment := note or ", ".join(keys) or next(reasons, ""):
            self.notes[("stages", *path) if in_slot else (*path,)] = comment

    def copy(self, fact: str, key: str = "") -> None:
        """Set a fact's value at `key`, which is by default named like the fact, if it is known."""
        if self.known(fact):
            self.put(key or fact, self.value(fact), fact)

    def lacks(self, key: str, name: str = "") -> None:
        """Mark a field that the user has to fill in, if no fact states it."""
        if not self.known(key):
            slot, _, field = key.partition(".")
            self.missing[key] = what = TABLES["missing"][name or key]
            path: KeyPath = ("stages", slot, "use")
            before = f"{self.notes[path]}; " if path in self.notes else ""
            self.notes[path] = f"{before}fill in `{field}`: {what}"

    def translation(self) -> Translation:
        """Return the recipe, None if a key blocks it, and the outcome of every key in order."""
        for entry in self.entries:
            if entry.outcome == "translated" and not entry.to:
                said = outcome(why("no_auto" if entry.auto else "idle"))
                entry.why, entry.outcome = said.why, said.outcome
            elif entry.auto and entry.to:
                stated = [f"{e.key} in {e.file}" for e in self.of(entry.fact) if not e.auto]
                entry.why = f"auto: as {[*stated, 'transformers fills it in'][0]}"
        blocked = any(entry.blocks for entry in self.entries)
        return Translation(
            recipe=None if blocked else {**self.header, "stages": self.slots}, notes=self.notes,
            missing={} if blocked else self.missing, outcomes=[*self.entries],
        )  # fmt: skip

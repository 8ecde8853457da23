"""The words of a table: what a key of a configuration file becomes, or why it does not.

A table maps keys to rules, or to tables for nested blocks. A value that matters becomes a *fact*.
A fact is named like the recipe key that takes it (`optimizer.lr`, `zero.stage` for `wrap.stage`),
or has a short name where `recipe.py` and `training.py` work out what the recipe says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, Union

from pipeline.importing import KeyOutcome


@dataclass(kw_only=True)
class RuleResult(KeyOutcome):
    """The outcome of a key, and the fact that it gives."""

    fact: str = ""
    """Name of the fact; empty unless the outcome is `translated`."""
    content: Any = None
    """Value of the fact."""
    auto: bool = False
    """Whether the value is `auto`. Another file then gives the fact, else `content` holds."""


Rule: TypeAlias = Callable[[Any], RuleResult]
Table: TypeAlias = Mapping[str, Union[Rule, "Table"]]
Read: TypeAlias = Callable[[Any], Any]
Test: TypeAlias = Callable[[Any], bool]


class WrongValueError(Exception):
    """A value that its key cannot have, or that no recipe expresses; `hint` says what to do."""

    def __init__(self, why: str, hint: str = "", *, blocks: bool = False) -> None:
        super().__init__(why)
        self.result = refused(why, hint, blocks=blocks)


def applied(rule: Rule, value: Any) -> RuleResult:
    """Return what the rule says of a value; its refusal, if the key cannot have the value."""
    try:
        return rule(value)
    except WrongValueError as error:
        return error.result


def table(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table with a row for each key; in `rows`, spaces divide keys of one rule."""
    return {key: rule for keys, rule in rows.items() for key in keys.split()}


def ignored(why: str) -> RuleResult:
    """Return the result of a key that needs no place in a recipe."""
    return RuleResult(outcome="default", why=why)


def unset() -> RuleResult:
    """Return the result of a value that gives nothing: null, or one that is off."""
    return ignored("is not set, or off")


def refused(why: str, hint: str = "", *, blocks: bool = False) -> RuleResult:
    """Return a refusal."""
    return RuleResult(outcome="refused", why=why, hint=hint, blocks=blocks)


def translated(fact: str, content: Any, *, auto: bool = False) -> RuleResult:
    """Return the result of a value that gives a fact."""
    return RuleResult(outcome="translated", fact=fact, content=content, auto=auto)


def sets(fact: str, read: Read = str, auto: Any = None, *, off: tuple[Any, ...] = ()) -> Rule:
    """Return a rule that gives the fact, read by `read`. Null and the values in `off` give none;
    `auto` is the meaning of the value `auto` where no other file gives the fact."""

    def rule(value: Any) -> RuleResult:
        if value is None or _among(value, off):
            return unset()
        automatic = value == "auto"
        return translated(fact, auto if automatic else read(value), auto=automatic)

    return rule


def when_on(fact: str, then: Any = None) -> Rule:
    """Return a rule for a switch. If it is on, the fact is `then`, or the value itself."""

    def rule(value: Any) -> RuleResult:
        on = not is_off(value)
        if on and then is not None and not isinstance(value, Mapping):
            on = truth(value)
        return translated(fact, value if then is None else then) if on else unset()

    return rule


def allowed(*values: Any, hint: str = "", blocks: bool = False) -> Rule:
    """Return a rule that accepts null, `auto` and `values`, and refuses every other value."""

    def rule(value: Any) -> RuleResult:
        if value is None or value == "auto" or _among(value, values):
            return ignored("every recipe does this")
        return refused(f"is always {values[0]} in a recipe", hint, blocks=blocks)

    return rule


def unsupported(why: str, hint: str = "", *, blocks: bool = False) -> Rule:
    """Return a rule that refuses every value but those that switch the setting off."""
    return lambda value: unset() if is_off(value) else refused(why, hint, blocks=blocks)


def only(test: Test, why: str, refusal: str, hint: str = "", *, blocks: bool = False) -> Rule:
    """Return a rule for values that need no place in a recipe if they pass a test, and are refused
    else; `{0!r}` in `refusal` is the value."""
    return lambda value: (
        ignored(why) if test(value) else refused(refusal.format(value), hint, blocks=blocks)
    )


def passes(why: str = "changes nothing that is trained") -> Rule:
    """Return a rule for a key that needs no place in a recipe, whatever its value."""
    return lambda value: ignored(why)


def untranslated(why: str) -> Rule:
    """Return a rule for a key that recipes have no place for, and that a user should look at."""
    return lambda value: unset() if is_off(value) else RuleResult(outcome="not translated", why=why)


def is_off(value: Any) -> bool:
    """Return whether a value is empty, or switches its setting off."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    return not value or str(value).lower() in ("no", "none", "false")


def _among(value: Any, values: tuple[Any, ...]) -> bool:
    """Whether value equals one of them; 0 differs from false, upper case equals lower case."""
    found = value.lower() if isinstance(value, str) else value
    return any(isinstance(found, bool) == isinstance(v, bool) and found == v for v in values)


def number(value: Any) -> float:
    """Return a finite number, also one written as text."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (ValueError, TypeError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise WrongValueError(f"must be a finite number, not {value!r}")
    return found


def whole(value: Any) -> int:
    """Return a whole number of at most 2^53, also one written as 2e8."""
    found = number(value)
    if found != int(found):
        raise WrongValueError(f"must be a whole number, not {value!r}")
    if abs(found) > 1 << 53:  # the next ones are no floats
        raise WrongValueError(f"must be at most 2^53, not {value!r}")
    return int(found)


def positive(value: Any) -> int:
    """Return a whole number of at least 1."""
    found = whole(value)
    if found < 1:
        raise WrongValueError(f"must be at least 1, not {value!r}")
    return found


def truth(value: Any) -> bool:
    """Return a boolean, also one written as text or as 0 or 1."""
    word = str(value).lower()
    if word not in ("true", "yes", "1", "false", "no", "0"):
        raise WrongValueError(f"must be true or false, not {value!r}")
    return word in ("true", "yes", "1")


def path(value: Any) -> str:
    """Return an absolute path. Relative ones start in the current folder, as in the tools."""
    found = str(value)
    return found if "://" in found else str(Path(found).expanduser().absolute())


def names(value: Any) -> list[str]:
    """Return a list of names, also one written as text with commas."""
    found = value.split(",") if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise WrongValueError(f"must be names, not {value!r}")
    return [each.strip() for each in found if each.strip()]


def choice(known: Collection[str], hint: str = "", *, blocks: bool = False) -> Read:
    """Return a reader of the known texts in any case; with a mapping, it returns their values."""

    def read(value: Any) -> Any:
        key = str(value).lower()
        if key in known:
            return known[key] if isinstance(known, Mapping) else key
        message = f"{value!r} is none of the values that a recipe has: {', '.join(known)}"
        raise WrongValueError(message, hint, blocks=blocks)

    return read


def recipe_name(value: Any) -> str:
    """Return a valid recipe name made of any text."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(str(value)).name).strip("-.") or "imported"

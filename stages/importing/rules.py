"""The words of a table: what a key of a configuration file becomes, or why it does not.

A table maps keys to rules, or to tables for nested blocks. A value that matters becomes a *fact*.
A fact is named like the recipe key that takes it (`optimizer.lr`, `zero.stage` for `wrap.stage`),
or has a short name where `recipe.py` and `training.py` work out what the recipe says.
"""

from __future__ import annotations

import json
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


CHOOSE = "choose another optimizer stage (`pipe stages`), and a rate for it"
FOREIGN = "other optimizer"
"""Fact: the name of an optimizer that recipes do not have."""


class WrongValueError(Exception):
    """A value that its key cannot have, or that no recipe expresses; `hint` says what to do."""

    def __init__(self, why: str, hint: str = "", *, blocks: bool = False) -> None:
        super().__init__(why)
        self.result = refused(why, hint, blocks=blocks)


def table(text: str, **names: Any) -> dict[str, Any]:
    """Return the table in a text of rows, `KEYS: RULE`, with one rule for all the keys:

        FACT READER off=VALUES auto=VALUE   the value gives the fact
        FACT = VALUE on=WORDS               a switch, also on for WORDS: the fact is VALUE
        always VALUES                       other values are refused
        refused WHY, untranslated WHY       unless the value is off
        ignored WHY                         needs no place in a recipe
        foreign RULE                        a refused value is an optimizer that recipes lack
        @NAME                               a rule of `names`

    ` -- HINT` ends the rule of a value that may be refused, ` !! HINT` of one that blocks the
    recipe then. `*` in a fact is the key. READER is a function of READERS or `names`, or the values
    that a key may have, `one, other=meaning`; text is read without. Values are JSON or text. A row
    goes on until it has a rule, and ` | ` stands between two on one line. `[BLOCK]` stands before
    the rows of a nested block.
    """
    rows: dict[str, Any] = {}
    blocks, keys = [""], list[str]()
    lines = re.split(r"\n| \| ", text.replace(":\n", ": "))
    for row in (" ".join(line.split()) for line in lines):
        if row.startswith("["):
            blocks = row.strip("[]").split()
            continue
        given, colon, what = row.partition(": ")
        keys += given.split()
        for path in (f"{block}.{key}" for block in blocks for key in keys if colon):
            *outer, key = path.strip(".").split(".")
            place = rows
            for block in outer:
                place = place.setdefault(block, {})
            place[key] = _rule(what.replace(".*", f".{key}"), names)
        keys = [] if colon else keys
    return rows


def _rule(text: str, names: Mapping[str, Any]) -> Rule:
    what, mark, hint = (*re.split(r" (--|!!)(?: |$)", text, maxsplit=1), "", "")[:3]
    kind, _, rest = what.partition(" ")
    refusal: dict[str, Any] = {"hint": hint, "blocks": mark == "!!"}
    if kind.startswith("@"):
        rule: Rule = names[kind[1:]]
        return rule
    if kind == "foreign":
        return _foreign(_rule(f"{rest} -- {CHOOSE}", names))
    if kind == "ignored":
        return passes(rest)
    if kind == "untranslated":
        return untranslated(rest)
    if kind == "refused":
        return unsupported(rest, **refusal)
    if kind == "always":
        return allowed(*_values(rest), **refusal)
    if rest.startswith("= "):
        then, _, words = rest[2:].partition(" on=")
        return when_on(kind, _value(then), *words.split(","))
    options: dict[str, Any] = {}
    for word in re.sub(r",\s+", ",", rest).split():
        name, equals, value = word.partition("=")
        if equals and name in ("off", "auto"):
            options[name] = _value(value) if name == "auto" else _values(value)
            continue
        if equals or "," in word:
            parts = (each.partition("=") for each in word.split(","))
            read: Any = {one: _value(meaning) if found else one for one, found, meaning in parts}
        else:
            read = names.get(word) or READERS[word]
        options["read"] = read if callable(read) else choice(read, **refusal)
    return sets(kind, **options)


def _values(text: str) -> list[Any]:
    return [_value(each.strip()) for each in text.split(",")]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _foreign(rule: Rule) -> Rule:
    def named(value: Any) -> RuleResult:
        result = applied(rule, value)
        if result.outcome == "refused":
            name = "another optimizer" if isinstance(value, bool) else str(value)
            result.fact, result.content = FOREIGN, name
        return result

    return named


def applied(rule: Rule, value: Any) -> RuleResult:
    """Return what the rule says of a value; its refusal, if the key cannot have the value."""
    try:
        return rule(value)
    except WrongValueError as error:
        return error.result


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


def sets(fact: str, read: Read = str, auto: Any = None, off: Collection[Any] = ()) -> Rule:
    """Return a rule that gives the fact, read by `read`. Null and the values in `off` give none;
    `auto` is the meaning of the value `auto` where no other file gives the fact."""

    def rule(value: Any) -> RuleResult:
        if value is None or _among(value, off):
            return unset()
        automatic = value == "auto"
        return translated(fact, auto if automatic else read(value), auto=automatic)

    return rule


def when_on(fact: str, then: Any, *words: str) -> Rule:
    """Return a rule for a switch, which `words` turn on too. If it is on, the fact is `then`."""

    def rule(value: Any) -> RuleResult:
        on = not is_off(value)
        if on and value not in words and not isinstance(value, Mapping):
            on = truth(value)
        return translated(fact, then) if on else unset()

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


def passes(why: str) -> Rule:
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


def _among(value: Any, values: Collection[Any]) -> bool:
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


def max_norm(value: Any) -> float | None:
    """Return the norm to clip gradients to; 0 means no clipping."""
    return number(value) or None


def betas(value: Any) -> list[float]:
    """Return the two decay rates of Adam."""
    if not isinstance(value, list) or len(value) != 2:
        raise WrongValueError(f"must be two numbers, not {value!r}")
    return [number(each) for each in value]


READERS: Mapping[str, Read] = {
    each.__name__: each
    for each in (number, whole, positive, truth, path, names, recipe_name, max_norm, betas)
}
"""Readers that tables call by their names."""

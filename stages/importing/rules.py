"""The words of a table: what a key of a configuration file becomes, or why it does not.

A table maps keys to rules, or to tables for nested blocks. A value that matters becomes a *fact*.
A fact is named like the recipe key that takes it (`optimizer.lr`, `zero.stage` for `wrap.stage`),
or has a short name where `recipe.py` works out what the recipe says.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
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
Block: TypeAlias = Mapping[str, Any]
Read: TypeAlias = Callable[[Any], Any]

WORDS: Mapping[str, Any] = {
    "ignored": "default", "untranslated": "not translated", "refused": "refused",
    "never": "refused",
}  # fmt: skip
CHOOSE = "choose another optimizer stage (`pipe stages`), and a rate for it"
FOREIGN = "other optimizer"
"""Fact: the name of an optimizer that recipes do not have."""


def outcome(text: str, **more: Any) -> RuleResult:
    """Return the outcome that a text says: `ignored WHY`, `untranslated WHY` or `refused WHY`, and
    ` -- HINT` at the end, or ` !! HINT` if the recipe is not written then."""
    what, mark, hint = _parts(text)
    word, _, why = what.partition(" ")
    return RuleResult(outcome=WORDS[word], why=why, hint=hint, blocks=mark == "!!", **more)


def translated(fact: str, content: Any, *, auto: bool = False) -> RuleResult:
    """Return the outcome of a value that gives a fact."""
    return RuleResult(outcome="translated", fact=fact, content=content, auto=auto)


def unset() -> RuleResult:
    """Return the outcome of a value that gives nothing: null, or one that is off."""
    return outcome("ignored is not set, or off")


class WrongValueError(Exception):
    """A value that its key cannot have, or that no recipe expresses: `WHY`, with a hint as in the
    text of an outcome."""


def applied(rule: Rule, value: Any) -> RuleResult:
    """Return what the rule says of a value; its refusal, if the key cannot have the value."""
    try:
        return rule(value)
    except WrongValueError as error:
        return outcome(f"refused {error}")


def rows(text: str) -> dict[str, str]:
    """Return what a text of rows, `KEYS: WHAT`, says of each key.

    A row goes on until it says something, and ` | ` stands between two on one line. `[BLOCK]`
    stands before the rows of a nested block, whose keys are dotted.
    """
    found: dict[str, str] = {}
    blocks, keys = [""], list[str]()
    lines = re.split(r"\n| \| ", text.replace(":\n", ": "))
    for row in (" ".join(line.split()) for line in lines):
        if row.startswith("["):
            blocks = [f"{block}." for block in row.strip("[]").split()]
            continue
        given, colon, what = row.partition(": ")
        keys += given.split()
        if colon:
            found |= {f"{block}{key}": what for block in blocks for key in keys}
            keys = []
    return found


def table(text: str, **names: Any) -> dict[str, Any]:
    """Return the table in a text of rows, which have a rule for each key."""
    found: dict[str, Any] = {}
    for path, what in rows(text).items():
        *outer, key = path.split(".")
        place = found
        for block in outer:
            place = place.setdefault(block, {})
        place[key] = rule(
            what if what.startswith("if ") else what.replace(".*", f".{key}"), **names
        )
    return found


def rule(text: str, **names: Any) -> Rule:
    """Return the rule that a text says:

        FACT READER off=VALUES auto=VALUE   the value gives the fact
        FACT = VALUE on=WORDS               a switch, also on for WORDS: the fact is VALUE
        always VALUES                       other values are refused
        refused WHY, untranslated WHY       unless the value is off
        ignored WHY, never WHY              whatever the value; `never` is a refusal
        if PATTERN then RULE else RULE      by the text of the value
        foreign RULE                        a refused value is an optimizer that recipes lack
        @NAME                               a rule of `names`

    A hint ends it as in an outcome, for a value that is refused. `*` in a fact is the key, but for
    rows with a PATTERN; {0!r} in WHY is the value. READER is a function of READERS or `names`, or
    the values that a key may have, `one, other=meaning`; text is read without. VALUES are JSON or
    text.
    """
    what, mark, hint = _parts(text)
    kind, _, rest = what.partition(" ")
    end = f" {mark} {hint}" if mark else ""
    if kind.startswith("@"):
        found: Rule = names[kind[1:]]
        return found
    if kind == "foreign":
        name = "another optimizer" if rest.startswith("refused") else ""
        return partial(_foreign, rule(f"{rest} -- {CHOOSE}", **names), name)
    if kind in WORDS:
        return partial(_says, text)
    if kind == "always":
        return partial(_always, _values(rest), end)
    if kind == "if":
        pattern, *both = re.findall(r"(.+?) then (.+?) else (.+)", text.removeprefix("if "))[0]
        one, other = (rule(each, **names) for each in both)
        test = re.compile(pattern, re.DOTALL).fullmatch
        return lambda value: (one if test(str(value)) else other)(value)
    if rest.startswith("= "):
        then, _, words = rest[2:].partition(" on=")
        return partial(_switch, kind, _value(then), words.split(","))
    options: dict[str, Any] = {}
    for word in re.sub(r",\s+", ",", rest).split():
        name, equals, value = word.partition("=")
        if equals and name in ("off", "auto"):
            options[name] = _value(value) if name == "auto" else _values(value)
            continue
        if equals or "," in word:
            parts = (each.partition("=") for each in word.split(","))
            read: Any = {one: _value(meaning) if given else one for one, given, meaning in parts}
        else:
            read = names.get(word) or READERS[word]
        options["read"] = read if callable(read) else choice(read, end)
    return sets(kind, **options)


def _parts(text: str) -> tuple[str, str, str]:
    """Return what a text says, the mark before its hint, and the hint."""
    forms = r"(.*?) (!!)(?: (.*))?", r"(.*) (--)(?: (.*))?"  # values may have the second mark too
    found = re.fullmatch(forms[" !!" not in text], text, re.DOTALL)
    return (found[1], found[2], found[3] or "") if found else (text, "", "")


def _values(text: str) -> list[Any]:
    return [_value(each.strip()) for each in text.split(",")]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def sets(fact: str, read: Read = str, auto: Any = None, off: Collection[Any] = ()) -> Rule:
    """Return a rule that gives the fact, read by `read`. Null and the values in `off` give none;
    `auto` is the meaning of the value `auto` where no other file gives the fact."""

    def rule(value: Any) -> RuleResult:
        if value is None or _among(value, off):
            return unset()
        automatic = value == "auto"
        return translated(fact, auto if automatic else read(value), auto=automatic)

    return rule


def _switch(fact: str, then: Any, words: Collection[str], value: Any) -> RuleResult:
    on = not is_off(value)
    if on and value not in words and not isinstance(value, Mapping):
        on = truth(value)
    return translated(fact, then) if on else unset()


def _says(text: str, value: Any) -> RuleResult:
    off = is_off(value) and not text.startswith(("ignored", "never"))
    return unset() if off else outcome(text.replace("{0!r}", repr(value)))


def _always(values: Collection[Any], end: str, value: Any) -> RuleResult:
    if value is None or value == "auto" or _among(value, values):
        return outcome("ignored every recipe does this")
    return outcome(f"refused is always {next(iter(values))} in a recipe{end}")


def _foreign(rule: Rule, name: str, value: Any) -> RuleResult:
    result = applied(rule, value)
    if result.outcome == "refused":
        result.fact, result.content = FOREIGN, name or str(value)
    return result


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


def choice(known: Collection[str], end: str = "") -> Read:
    """Return a reader of the known texts in any case; with a mapping, it returns their values.
    `end` is the hint about others, with its mark."""

    def read(value: Any) -> Any:
        key = str(value).lower()
        if key in known:
            return known[key] if isinstance(known, Mapping) else key
        which = f"{value!r} is none of the values that a recipe has: {', '.join(known)}"
        raise WrongValueError(f"{which}{end}")

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

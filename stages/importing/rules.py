"""The tables in `tables/*.txt`: what a key of a configuration file becomes, or why it does not.

A value that matters becomes a *fact*. A fact is named like the recipe key that takes it
(`optimizer.lr`, `zero.stage` for `wrap.stage`), or has a short name where `recipe.py` works out
what the recipe says. `tables/words.txt` describes what the lines of a table say.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, Union

from pipeline.importing import KeyOutcome
from pipeline.utils import expanded


@dataclass(kw_only=True)
class RuleResult(KeyOutcome):
    """The outcome of a key, and the fact that follows from it."""

    outcome: Literal["translated", "default", "not translated", "refused"] = "translated"
    fact: str = ""
    """Name of the fact; empty unless the outcome is `translated`."""
    content: Any = None
    auto: bool = False
    """Whether the value is `auto`: another file then states the fact, else `content` holds."""


Table: TypeAlias = Mapping[str, Union[Callable[[Any], RuleResult], "Table"]]
TABLES: dict[str, dict[str, Any]] = {}
"""Name -> table, of all files that were loaded."""
SHARED = ("words", "script", "fsdp")
"""Tables whose rows every table's rows may name."""
OUTCOMES: Mapping[str, Any] = {"ignored": "default", "untranslated": "not translated"}
CHOOSE = "choose another optimizer stage (`pipe stages`), and a rate for it"
FOREIGN = "other optimizer"
"""Fact: the name of an optimizer that recipes do not have."""


class WrongValueError(Exception):
    """A value that its key cannot have, or that no recipe expresses: the text of an outcome."""


def rows(line: str) -> dict[str, str]:
    """Return key -> what a line says of it."""
    parts = (row.partition(": ") for row in line.split(" | "))
    return {key: what for keys, _, what in parts for key in keys.split()}


def load(file: str, *functions: Callable[..., Any], **values: Any) -> Mapping[str, dict[str, Any]]:
    """Read the tables of a file, and return all tables. Their rows name these functions and values,
    what earlier files define, and shared rows."""
    NAMES.update({each.__name__: each for each in functions}, **values)
    text = Path(__file__).with_name("tables").joinpath(f"{file}.txt").read_text("utf-8")
    for part in re.sub(r"\n +", " ", text).split("\n== ")[1:]:
        name, *lines = part.split("\n")
        table = TABLES[name.removesuffix(" =")] = {}
        names = ChainMap(NAMES, table, *(TABLES.get(one, {}) for one in SHARED))
        blocks = [""]
        for line in (line for line in lines if line and line[0] != "#"):
            if name.endswith(" ="):
                table.update(rows(line))
            elif line[0] == "[":
                blocks = [f"{block}." for block in line.strip("[]").split()]
            else:
                for block, (key, one) in itertools.product(blocks, _rules(line, names)):
                    *outer, last = f"{block}{key}".split(".")
                    place = table
                    for part in outer:
                        place[part] = {**place.get(part, {})}  # not the block of another table
                        place = place[part]
                    place[last] = one
    return TABLES


def _rules(line: str, names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a line, or of the table that it names, with their rules."""
    if line[0] == "+":
        other, *words = line[2:].split()
        prefix = "".join(word for word in words if word[0] != "-")
        for key, one in TABLES[other].items():
            if f"-{key}" not in words:
                yield f"{prefix}{key}", one
        return
    for key, what in rows(line).items():
        text = what if what.startswith("if ") else what.replace(".*", f".{key.rpartition('.')[2]}")
        named = names[text[1:]] if text[0] == "@" else None
        yield key, named if isinstance(named, Rule) else Rule(text, names)


def why(name: str, *values: object) -> str:
    """Return the text of an outcome that has a name, with these values in it."""
    text: str = TABLES["words"][name].text
    return text.format(*values) if values else text


def outcome(text: str, **more: Any) -> RuleResult:
    """Return the outcome that a text says, such as `ignored WHY`, with a hint as in a rule."""
    what, mark, hint = parts(text)
    word, _, reason = what.partition(" ")
    found, blocks = OUTCOMES.get(word, "refused"), mark == "!!"
    return RuleResult(outcome=found, why=reason, hint=hint, blocks=blocks, **more)


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule in the words of a table. `names` are what it may name."""

    text: str
    names: Mapping[str, Any] = field(default_factory=lambda: NAMES)

    def __call__(self, value: Any) -> RuleResult:
        """Return the outcome of a value; its refusal, if the key cannot have it."""
        what, mark, hint = parts(self.text)
        kind, _, rest = what.partition(" ")
        try:
            if kind[0] == "@":
                found: RuleResult = self.names[kind[1:]](value)
                return found
            if kind == "if":
                pattern, *both = re.findall(r"if (.+?) then (.+?) else (.+)", self.text)[0]
                chosen = both[not re.fullmatch(pattern, str(value), re.DOTALL)]
                return Rule(chosen, self.names)(value)
            if kind == "foreign":
                found = Rule(f"{rest} -- {CHOOSE}", self.names)(value)
                if found.outcome == "refused":
                    unnamed = rest.startswith("refused")
                    found.content = "another optimizer" if unnamed else str(value)
                    found.fact = FOREIGN
                return found
            if kind in (*OUTCOMES, "refused", "never"):
                off = is_off(value) and kind not in ("ignored", "never")
                return outcome(why("off") if off else self.text.replace("{0!r}", repr(value)))
            return self._fact(kind, rest, f" {mark} {hint}" if mark else "", value)
        except WrongValueError as error:
            return outcome(str(error))

    def _fact(self, fact: str, rest: str, end: str, value: Any) -> RuleResult:
        """Return the outcome of a value that makes a fact, or must be one of some."""
        sign, _, then = rest.partition(" ")
        if fact == "always":
            usual = value is None or value == "auto" or _among(value, rest)
            first = value_of(rest.partition(",")[0])
            return outcome(why("usual") if usual else f"refused is always {first} in a recipe{end}")
        if sign == ":=":
            return RuleResult(fact=fact, content=value_of(then))
        if sign == "=":
            then, _, words = then.partition(" on=")
            on = not is_off(value)
            if on and value not in words.split(",") and not isinstance(value, Mapping):
                on = truth(value)
            return RuleResult(fact=fact, content=value_of(then)) if on else outcome(why("off"))
        read: Any = str
        options: dict[str, str] = {}
        for word in re.sub(r",\s+", ",", rest).split():
            name, equals, one = word.partition("=")
            if equals and name in ("off", "auto"):
                options[name] = one
            elif equals or "," in word:
                pairs = (each.partition("=") for each in word.split(","))
                read = {each: value_of(what) if given else each for each, given, what in pairs}
            else:
                read = self.names[word]
        if value is None or ("off" in options and _among(value, options["off"])):
            return outcome(why("off"))
        if value == "auto":
            return RuleResult(fact=fact, content=value_of(options.get("auto", "null")), auto=True)
        if callable(read):
            return RuleResult(fact=fact, content=read(value))
        if str(value).lower() not in read:
            which = f"refused {value!r} is none of the values that a recipe has: {', '.join(read)}"
            raise WrongValueError(f"{which}{end}")
        return RuleResult(fact=fact, content=read[str(value).lower()])


def parts(text: str) -> tuple[str, str, str]:
    """Return what a text says, the mark before its hint, and the hint."""
    forms = r"(.*?) (!!)(?: (.*))?", r"(.*) (--)(?: (.*))?"  # values may have the second mark too
    found = re.fullmatch(forms[" !!" not in text], text, re.DOTALL)
    return (found[1], found[2], found[3] or "") if found else (text, "", "")


def value_of(text: str) -> Any:
    """Return the value that is written as JSON, or as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _among(value: Any, text: str) -> bool:
    """Return whether value equals one of some; 0 differs from false, and case does not count."""
    found = value.lower() if isinstance(value, str) else value
    values = [value_of(each.strip()) for each in text.split(",")]
    return any(isinstance(found, bool) == isinstance(v, bool) and found == v for v in values)


def is_off(value: Any) -> bool:
    """Return whether a value is empty, or switches its setting off."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    return not value or str(value).lower() in ("no", "none", "false")


def number(value: Any) -> float:
    """Return a finite number, also one written as text."""
    found = math.nan
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        found = math.nan if isinstance(value, bool) else float(value)
    if not math.isfinite(found):
        raise WrongValueError(f"refused must be a finite number, not {value!r}")
    return found


def whole(value: Any, least: float = -math.inf) -> int:
    """Return a whole number of at most 2^53, after which not all are floats; 2e8 is one too."""
    found = number(value)
    big = abs(found) > 1 << 53
    wrong = "a whole number" if found != int(found) else "at most 2^53" if big else ""
    if wrong or found < least:
        raise WrongValueError(f"refused must be {wrong or f'at least {least}'}, not {value!r}")
    return int(found)


def truth(value: Any) -> bool:
    """Return a boolean, also one written as text or as 0 or 1."""
    word = str(value).lower()
    if word not in ("true", "yes", "1", "false", "no", "0"):
        raise WrongValueError(f"refused must be true or false, not {value!r}")
    return word in ("true", "yes", "1")


def path(value: Any) -> str:
    """Return an absolute path. Relative ones start in the current folder, as in the tools."""
    return str(value) if "://" in str(value) else str(expanded(str(value)).absolute())


def names(value: Any) -> list[str]:
    """Return a list of names, also one written as text with commas."""
    found = value.split(",") if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise WrongValueError(f"refused must be names, not {value!r}")
    return [each.strip() for each in found if each.strip()]


def betas(value: Any) -> list[float]:
    """Return the two decay rates of Adam."""
    if not isinstance(value, list) or len(value) != 2:
        raise WrongValueError(f"refused must be two numbers, not {value!r}")
    return [number(each) for each in value]


def recipe_name(value: Any) -> str:
    """Return a valid recipe name made of any text."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(str(value)).name).strip("-.") or "imported"


positive = functools.partial(whole, least=1)
NAMES: dict[str, Any] = {
    each.__name__: each for each in (number, whole, truth, path, names, betas, recipe_name)
} | {"positive": positive, "max_norm": lambda value: number(value) or None}
"""Functions and values that rows may name."""

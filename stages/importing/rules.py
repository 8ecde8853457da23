"""Rules: what is to become of a key, given its value.

A table maps the keys of a file or block to rules, or to tables for blocks within. A rule looks at
one value and gives a verdict. What a key says of the training is a *fact* (`lr`, `zero.stage`),
which `compose.py` puts into the recipe once all files have been read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, Union

from pipeline.importing.translator import Outcome
from pipeline.utils.text import closest


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a rule says of a value."""

    outcome: Outcome
    fact: str = ""
    """With `translated`: what the value is a fact of."""
    value: Any = None
    why: str = ""
    hint: str = ""
    blocks: bool = False


@dataclass(frozen=True, kw_only=True)
class Auto:
    """The value `auto`: what another file says, else the default that transformers has."""

    default: Any


Rule: TypeAlias = Callable[[Any], Verdict]
Table: TypeAlias = Mapping[str, Union[Rule, "Table"]]
Read: TypeAlias = Callable[[Any], Any]

UNSET = "is not set"


class WrongValueError(Exception):
    """A value that its key cannot have, or that a recipe cannot say; `hint` is what to do."""

    def __init__(self, message: str, hint: str = "", *, blocks: bool = False) -> None:
        super().__init__(message)
        self.hint = hint
        self.blocks = blocks


def judge(rule: Rule, value: Any) -> Verdict:
    """The rule's verdict; a refusal for a value that the rule cannot understand."""
    try:
        return rule(value)
    except WrongValueError as error:
        return _refusal(str(error), error.hint, blocks=error.blocks)


def says(fact: str, read: Read, why: str = "") -> Rule:
    """The value, as `read` understands it, is a fact. null says nothing."""

    def rule(value: Any) -> Verdict:
        if value is None:
            return Verdict(outcome="default", why=UNSET)
        return Verdict(outcome="translated", fact=fact, value=read(value), why=why)

    return rule


def unless(absent: tuple[Any, ...], rule: Rule, why: str = UNSET) -> Rule:
    """`rule`, except for values that say nothing."""

    def checked(value: Any) -> Verdict:
        if _among(value, absent):
            return Verdict(outcome="default", why=why)
        return rule(value)

    return checked


def auto(fact: str, default: Any, read: Read, why: str = "") -> Rule:
    """As `says`, but the value may be `auto`."""
    plain = says(fact, read, why)

    def rule(value: Any) -> Verdict:
        if value == "auto":
            return Verdict(outcome="translated", fact=fact, value=Auto(default=default), why=why)
        return plain(value)

    return rule


def covered(why: str) -> Rule:
    """Whatever the value: it is so anyway, or means nothing to a recipe."""
    return lambda value: Verdict(outcome="default", why=why)


def only(*values: Any, why: str, otherwise: str, hint: str = "", blocks: bool = False) -> Rule:
    """These values (and null) are what happens anyway; others are refused."""

    def rule(value: Any) -> Verdict:
        if value is None or value == "auto" or _among(value, values):
            return Verdict(outcome="default", why=why)
        return _refusal(otherwise, hint, blocks=blocks)

    return rule


def never(why: str, hint: str = "", *, blocks: bool = False) -> Rule:
    """Refused, unless it is empty or switched off."""
    off: tuple[Any, ...] = (False, "", {}, [], "no", "none")
    return only(*off, why=f"{UNSET}, or off", otherwise=why, hint=hint, blocks=blocks)


def switched(fact: str, why: str = "") -> Rule:
    """A block of settings that goes into the recipe whole if it is on."""

    def rule(value: Any) -> Verdict:
        if not value or (isinstance(value, Mapping) and value.get("enabled") is False):
            return Verdict(outcome="default", why="is off")
        return Verdict(outcome="translated", fact=fact, value=value, why=why)

    return rule


def _among(value: Any, values: tuple[Any, ...]) -> bool:
    """Equal to one of them; 0 and false are different values, upper and lower case are not."""
    text = value.lower() if isinstance(value, str) else value
    return any(type(text) is type(each) and text == each for each in values)


def _refusal(why: str, hint: str, *, blocks: bool) -> Verdict:
    return Verdict(outcome="refused", why=why, hint=hint, blocks=blocks)


_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def number(value: Any) -> float:
    """A finite number, or text that is one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise WrongValueError(f"must be a number, not {value!r}")
    try:
        found = float(value)
    except ValueError as error:
        raise WrongValueError(f"must be a number, not {value!r}") from error
    if not math.isfinite(found):
        raise WrongValueError(f"must be a finite number, not {value!r}")
    return found


def whole(value: Any) -> int:
    """A whole number, also one written as 2e8."""
    found = number(value)
    if found != int(found):
        raise WrongValueError(f"must be a whole number, not {value!r}")
    return int(found)


def positive(value: Any) -> int:
    """A whole number of at least 1."""
    found = whole(value)
    if found < 1:
        raise WrongValueError(f"must be at least 1, not {value!r}")
    return found


def truth(value: Any) -> bool:
    """A boolean, or text that is one."""
    if isinstance(value, bool):
        return value
    found = _WORDS.get(str(value).lower())
    if found is None:
        raise WrongValueError(f"must be true or false, not {value!r}")
    return found


def text(value: Any) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value:
        raise WrongValueError(f"must be text, not {value!r}")
    return value


def path(value: Any) -> str:
    """A path; relative ones are relative to where the tools are started, which is here."""
    found = text(value)
    return found if "://" in found else str(Path(found).expanduser().absolute())


def pair(value: Any) -> list[float]:
    """Two numbers."""
    if not isinstance(value, list) or len(value) != 2:
        raise WrongValueError(f"must be two numbers, not {value!r}")
    return [number(each) for each in value]


def names(value: Any) -> list[str]:
    """A list of names, or text with commas between them."""
    found = value.split(",") if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise WrongValueError(f"must be names, not {value!r}")
    return [each.strip() for each in found if each.strip()]


def as_written(value: Any) -> Any:
    """Whatever it is."""
    return value


def choice(known: Mapping[str, Any], hint: str = "", *, blocks: bool = False) -> Read:
    """One of the known texts, in whatever case."""

    def read(value: Any) -> Any:
        key = str(value).lower()
        if key in known:
            return known[key]
        similar = closest(key, known)
        advice = hint or (f"did you mean `{similar}`?" if similar else "")
        raise WrongValueError(
            f"{value!r} is none of those that a recipe has: {', '.join(known)}",
            advice,
            blocks=blocks,
        )

    return read


def recipe_name(value: Any) -> str:
    """What a run can be called, made of any text."""
    found = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(text(value)).name).strip("-.")
    if not found:
        raise WrongValueError(f"no name can be made of {value!r}")
    return found

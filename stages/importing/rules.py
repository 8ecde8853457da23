"""Rules: what is to become of a key, given its value.

A table maps the keys of a file or block to rules, or to tables for blocks within. A rule looks at
one value and gives a verdict. What a key says of the training is a *fact* (`lr`, `zero.stage`),
which `compose.py` puts into the recipe once all files have been read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, Union

from pipeline.importing.translator import Outcome


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

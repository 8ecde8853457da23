"""Plain YAML scalars: YAML 1.2's core schema, without what surprises people.

`true`, `null`, `-8` and `1e-4` mean what they look like. Everything else is text: `no`, `12:30`,
`007`, `0x10`, `1_000`, `2024-01-01`, `.inf`. A field that wants no text then refuses it and says
what to write instead, so nothing changes its meaning silently.
"""

from __future__ import annotations

import contextlib
import math
import re

Scalar = str | int | float | bool | None

_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
}
INT = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,39})")
# with a dot or an exponent: a whole number too long for INT stays text, not rounded
FLOAT = re.compile(
    r"(?=.*[.eE])[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
)
_YES = {"yes", "on", "y"}
_NO = {"no", "off", "n"}


def resolve(text: str) -> Scalar:
    """The value of an unquoted scalar."""
    if text in _WORDS:
        return _WORDS[text]
    if INT.fullmatch(text):
        return int(text)
    if FLOAT.fullmatch(text) and math.isfinite(number := float(text)):
        return number
    return text


def what_to_write(text: str) -> str:
    """Hint for a text that stands where another type belongs; empty when there is none."""
    if text.lower() in _YES:
        return "write true"
    if text.lower() in _NO:
        return "write false"
    if not isinstance(resolve(text), str):
        return "remove the quotes"
    number = _as_number(text)
    return _in_words(text) if number is None else f"write {number}"


def _in_words(text: str) -> str:
    """Hint for a number with something after it: a comma, a percent sign, k or M."""
    found = re.fullmatch(r"([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)\s*([,;%kKmMbB])", text)
    number = None if found is None else _as_number(found[1])
    if found is None or number is None:
        return ""
    mark = found[2].lower()
    if mark == "%":
        return f"write {round(number / 100, 10)}"
    if mark in ",;":
        return f"write {number}, without `{mark}`"
    power = {"k": 1, "m": 2, "b": 3}[mark]
    decimal, binary = int(number * 1000**power), int(number * 1024**power)
    return f"write all digits: {decimal} or {binary}"


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def in_seconds(text: str) -> str:
    """Hint for a duration such as `30m` or `2 hours`, where seconds are wanted; empty for a text
    that is none."""
    units = "s|secs?|seconds?|m|mins?|minutes?|h|hrs?|hours?|d|days?"
    found = re.fullmatch(rf"([0-9]+(?:\.[0-9]+)?)\s*({units})", text)
    number = None if found is None else _as_number(found[1])
    factor = None if found is None else _SECONDS.get(found[2][0])
    if number is None or factor is None:
        return ""
    return f"seconds: write {number * factor:g}"


def _as_number(text: str) -> int | float | None:
    """The number in notations that YAML 1.1 or Python know and recipes do not."""
    for base in (10, 0):  # base 0 goes by the prefix, as in 0x10
        with contextlib.suppress(ValueError):
            return int(text, base)
    with contextlib.suppress(ValueError):
        number = float(text)
        return number if math.isfinite(number) else None
    return None

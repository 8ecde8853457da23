"""How values are understood: the tools write numbers as text and choices as numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.suggest import closest
from stages.importing.rules import Read, WrongValueError

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

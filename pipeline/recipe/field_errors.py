"""pydantic's errors -> problems in plain words, at the place in the recipe."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.contracts.signature import dataclasses_in, field_types
from pipeline.errors import Problem
from pipeline.recipe.dump import inline
from pipeline.recipe.field_example import Adapter, example
from pipeline.recipe.nodes import TAKES, KeyPath, MissingKey, SourceMap, UnknownKey, dotted, lookup
from pipeline.recipe.scalars import what_to_write
from pipeline.utils.text import closest, did_you_mean

_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "none_required": "null",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "frozen_set_type": "a list",
    "dict_type": "a mapping",
    "dataclass_type": "a mapping",
}
_MESSAGES = {
    "missing": "is required",
    "unexpected_keyword_argument": "unknown field",
    "value_error": "{error}",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "too_short": "needs at least {min_length} entries",
    "too_long": "can have at most {max_length} entries",
    "string_too_short": "needs at least {min_length} characters",
    "string_too_long": "can have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fault:
    """One pydantic error: where in the data, and what was wanted or what is wrong."""

    path: KeyPath
    type: str
    wanted: str = ""
    options: tuple[str, ...] = ()
    message: str = ""
    most: float | None = None
    """The upper bound that the value is above."""


def to_problems(
    errors: Sequence[Any],
    kind: type,
    data: Mapping[str, Any],
    places: SourceMap,
    base: KeyPath,
    *,
    adapter: Adapter,
) -> list[Problem]:
    """Problems of `data`, written at `base`, as a `kind`; problems of one value become one.
    `adapter` tries values that hints name."""
    faults = [_fault(error, data) for error in errors]
    problems = []
    for path in dict.fromkeys(fault.path for fault in faults):
        here = [fault for fault in faults if fault.path == path]
        inside = any(len(f.path) > len(path) and f.path[: len(path)] == path for f in faults)
        problem = _problem(here, kind, places, base, adapter, inside=inside)
        if problem is not None:
            problems.append(problem)
    return problems


def _fault(error: Any, data: Any) -> _Fault:
    path, kind, context = _path(error, data), error["type"], error.get("ctx", {})
    if kind in _WANTED:
        return _Fault(path=path, type=kind, wanted=_WANTED[kind])
    if kind == "literal_error":
        # `'a', 'b' or 'c'`
        parts = context["expected"].replace(" or ", ", ").split(", ")
        return _Fault(path=path, type=kind, options=tuple(part.strip("'") for part in parts))
    known = _MESSAGES.get(kind)
    return _Fault(
        path=path, type=kind, message=known.format(**context) if known else error["msg"],
        most=context.get("le", context.get("lt")),
    )  # fmt: skip


def _path(error: Any, data: Any) -> KeyPath:
    """pydantic's location without the names of a union's members, which are not in the data."""
    loc, path = error["loc"], []
    for index, part in enumerate(loc):
        last = index == len(loc) - 1
        if isinstance(data, dict) and part in data:
            data = data[part]
        elif isinstance(data, list) and isinstance(part, int):
            data = data[part] if part < len(data) else None
        elif not (last and error["type"] == "missing"):
            continue
        path.append(part)
    return tuple(path)


def _problem(
    faults: list[_Fault],
    kind: type,
    places: SourceMap,
    base: KeyPath,
    adapter: Adapter,
    *,
    inside: bool,
) -> Problem | None:
    path = (*base, *faults[0].path)
    said = [fault for fault in faults if fault.message]
    if said:
        message = said[0].message
        hint = _hint(said[0], kind) or _in_range(said[0], lookup(places.data, path))
        if said[0].type not in ("missing", "unexpected_keyword_argument", "value_error"):
            message += f", not {_shown(places, path)}"
    elif inside:
        # another member of the union took the value and complains about what is in it
        return None
    else:
        message, near = _wanted(faults, places, path)
        given = example(kind, faults[0].path, lookup(places.data, path), adapter)
        hint = given if given.startswith("seconds:") else near or given
    by_key = said and said[0].type in ("missing", "unexpected_keyword_argument")
    place = places.key(path) if by_key else places.value(path)
    if faults[0].type == "unexpected_keyword_argument":
        return UnknownKey(
            message=message, key=dotted(path), hint=hint, location=place,
            path=path, value=lookup(places.data, path),
            closest=closest(str(path[-1]), _known(faults[0], kind)) or "",
        )  # fmt: skip
    if faults[0].type == "missing":
        return MissingKey(message=message, key=dotted(path), hint=hint, location=place)
    return Problem(message=message, key=dotted(path), hint=hint, location=place)


def _wanted(faults: list[_Fault], places: SourceMap, path: KeyPath) -> tuple[str, str]:
    options = [option for fault in faults for option in fault.options]
    wanted = list(dict.fromkeys(fault.wanted for fault in faults if fault.wanted))
    *most, last = [*(f"`{option}`" for option in options), *wanted]
    either = f"{', '.join(most)} or {last}" if most else last
    message = f"must be {either}, not {_shown(places, path)}"
    written = lookup(places.data, path)
    if not isinstance(written, str):
        only_text = wanted == ["text"] and isinstance(written, int | float)
        return message, f'write "{inline(written)}"' if only_text else ""
    if written in options:
        return message, "remove the quotes"
    found = closest(written.lower(), options)
    if found is not None:
        return message, f"did you mean `{found}`?"
    if {"a whole number", "a number", "true or false"}.isdisjoint(wanted):
        return message, ""
    hint = what_to_write(written)
    is_word = hint in ("write true", "write false")
    fits = is_word == ("true or false" in wanted) or hint == "remove the quotes"
    return message, hint if fits else ""


def _in_range(fault: _Fault, written: Any) -> str:
    """Return a hint for a number or a text that is out of range; empty without a good guess."""
    if fault.most is not None and fault.most <= 1 and isinstance(written, int | float):
        return f"{written} % is {written / 100}" if 1 < written <= 100 else ""
    if fault.type == "string_pattern_mismatch" and isinstance(written, str):
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", written).strip("-.")
        fits = re.fullmatch(fault.message.removeprefix("must match "), plain) is not None
        return f"write {plain}" if fits else ""
    return ""


def _hint(fault: _Fault, kind: type) -> str:
    if fault.type != "unexpected_keyword_argument":
        return ""
    name = str(fault.path[-1])
    field, _, value = name.partition(" ")
    if value and field in _known(fault, kind):  # in braces, where YAML takes it for a key
        return f"a colon is missing: write `{field}: {value.strip()}`"
    known = _known(fault, kind)
    if len(fault.path) == 1 and hasattr(kind, "run") and closest(name, [*known, TAKES]) == TAKES:
        return f"did you mean `{TAKES}`?"
    return did_you_mean(name, known)


def _known(fault: _Fault, kind: type) -> list[str]:
    """The fields that a key next to them could have been."""
    owners = [kind]
    for part in fault.path[:-1]:
        if isinstance(part, str):
            hints = [field_types(owner).get(part) for owner in owners]
            owners = [found for hint in hints for found in dataclasses_in(hint)]
    return sorted({name for owner in owners for name in field_types(owner)})


def _shown(places: SourceMap, path: KeyPath) -> str:
    """The value as it was written, so that no environment variable's value is printed."""
    written = lookup(places.data, path)
    if isinstance(written, dict):
        return "a mapping"
    if isinstance(written, list):
        return f"a list of {len(written)}"
    if isinstance(written, str):
        return f"the text `{written}`"
    return f"`{inline(written)}`"

"""pydantic's errors -> problems in plain words, at the place in the recipe, with what to write."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

from annotated_types import Unit
from pydantic import TypeAdapter, ValidationError

from pipeline.contracts.signature import dataclasses_in, default_of, field_types, init_fields
from pipeline.errors import Problem
from pipeline.recipe.dump import inline
from pipeline.recipe.nodes import TAKES, KeyPath, MissingKey, Node, UnknownKey
from pipeline.recipe.parse import scalar
from pipeline.utils.text import closest, did_you_mean

WANTED = {
    **dict.fromkeys(("int_type", "int_from_float"), "a whole number"),
    **dict.fromkeys(("list_type", "tuple_type", "set_type", "frozen_set_type"), "a list"),
    **dict.fromkeys(("dict_type", "dataclass_type"), "a mapping"),
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "none_required": "null",
}
MESSAGES = {
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
Adapter = Callable[[type], TypeAdapter[Any]]
"""A dataclass -> what validates it."""


def to_problems(
    errors: Sequence[Any], kind: type, data: Mapping[str, Any], tree: Node, base: KeyPath, *,
    adapter: Adapter,
) -> list[Problem]:  # fmt: skip
    """Problems of `data`, written at `base`, as a `kind`; problems of one value become one.
    `adapter` tries values that hints name."""
    by_path: dict[KeyPath, list[Any]] = {}
    problems = []
    for error in errors:
        by_path.setdefault(_path(error, data), []).append(error)
    for path, here in by_path.items():
        whole = (*base, *path)
        written = tree.written(whole)
        said = [one for one in here if one["type"] not in (*WANTED, "literal_error")]
        if said:
            problems.append(_broken_rule(said[0], kind, path, tree, whole))
        # else another member of the union may have taken the value, and complain of what is in it
        elif all(len(one) <= len(path) or one[: len(path)] != path for one in by_path):
            message, near = _wrong_type(here, written)
            given = example(kind, path, written, adapter)
            hint = given if given.startswith("seconds:") else near or given
            problems.append(tree.problem(whole, message, hint))
    return problems


def _path(error: Any, data: Any) -> KeyPath:
    """pydantic's location without the names of a union's members, which are not in the data."""
    path = []
    for index, part in enumerate(error["loc"], start=1):
        if isinstance(data, dict) and part in data:
            data = data[part]
        elif isinstance(data, list) and isinstance(part, int):
            data = data[part] if part < len(data) else None
        elif index < len(error["loc"]) or error["type"] != "missing":
            continue
        path.append(part)
    return tuple(path)


def _broken_rule(error: Any, kind: type, path: KeyPath, tree: Node, whole: KeyPath) -> Problem:
    """The problem of an error that is not about the type of a value."""
    sort, context, written = error["type"], error.get("ctx", {}), tree.written(whole)
    message = MESSAGES[sort].format(**context) if sort in MESSAGES else error["msg"]
    hint, name = "", str(path[-1])
    if sort == "missing":
        return tree.problem(whole, message, kind=MissingKey, at_key=True)
    if sort == "unexpected_keyword_argument":
        known = sorted({name for owner in owners_of(kind, path) for name in field_types(owner)})
        field, _, value = name.partition(" ")
        hint = did_you_mean(name, known)
        if value and field in known:  # in braces, where YAML takes it for a key
            hint = f"a colon is missing: write `{field}: {value.strip()}`"
        elif len(path) == 1 and hasattr(kind, "run") and closest(name, [*known, TAKES]) == TAKES:
            hint = f"did you mean `{TAKES}`?"
        more = {"path": whole, "value": written, "closest": closest(name, known) or ""}
        return tree.problem(whole, message, hint, kind=UnknownKey, at_key=True, **more)
    if sort != "value_error":
        message += f", not {_shown(written)}"
    most = context.get("le", context.get("lt"))
    if most is not None and most <= 1 and isinstance(written, int | float) and 1 < written <= 100:
        hint = f"{written} % is {written / 100}"
    if sort == "string_pattern_mismatch" and isinstance(written, str):
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", written).strip("-.")
        hint = f"write {plain}" if re.fullmatch(context["pattern"], plain) else ""
    return tree.problem(whole, message, hint)


def _wrong_type(errors: Sequence[Any], written: Any) -> tuple[str, str]:
    """Message and hint for a value of the wrong type, or that is none of the options."""
    options = []
    for error in errors:
        if error["type"] == "literal_error":  # `'a', 'b' or 'c'`
            parts = error["ctx"]["expected"].replace(" or ", ", ").split(", ")
            options += [part.strip("'") for part in parts]
    wanted = list(dict.fromkeys(WANTED[e["type"]] for e in errors if e["type"] in WANTED))
    *most, last = [*(f"`{option}`" for option in options), *wanted]
    either = f"{', '.join(most)} or {last}" if most else last
    message = f"must be {either}, not {_shown(written)}"
    if not isinstance(written, str):
        only_text = wanted == ["text"] and isinstance(written, int | float)
        return message, f'write "{inline(written)}"' if only_text else ""
    if written in options:
        return message, "remove the quotes"
    if found := closest(written.lower(), options):
        return message, f"did you mean `{found}`?"
    if {"a whole number", "a number", "true or false"}.isdisjoint(wanted):
        return message, ""
    hint = _suggest_literal(written)
    is_word = hint in ("write true", "write false")
    fits = is_word == ("true or false" in wanted) or hint == "remove the quotes"
    return message, hint if fits else ""


def _shown(written: Any) -> str:
    """The value as it was written, so that no environment variable's value is printed."""
    if isinstance(written, dict):
        return "a mapping"
    if isinstance(written, list):
        return f"a list of {len(written)}"
    return f"the text `{written}`" if isinstance(written, str) else f"`{inline(written)}`"


def _suggest_literal(text: str) -> str:
    """Hint for a text that stands where a number or a boolean belongs; empty when there is none."""
    words = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
    if word := words.get(text.lower()):
        return f"write {word}"
    if not isinstance(scalar(text), str):
        return "remove the quotes"
    if (number := _as_number(text)) is not None:
        return f"write {number}"
    # a number with something after it: a comma, a percent sign, k or M
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


def _as_number(text: str) -> int | float | None:
    """The number in notations that YAML 1.1 or Python know and recipes do not."""
    for base in (10, 0):  # base 0 goes by the prefix, as in 0x10
        with contextlib.suppress(ValueError):
            return int(text, base)
    with contextlib.suppress(ValueError):
        return number if math.isfinite(number := float(text)) else None
    return None


def example(kind: type, path: KeyPath, written: Any, adapter: Adapter) -> str:
    """Return a hint with a value that the field at `path` of the dataclass `kind` can have, as
    close to the written one as possible; empty if there is none to name."""
    owner, name = owner_of(kind, path), str(path[-1])
    if owner is None:
        return ""
    annotation = field_types(owner)[name]
    default = next(default_of(field) for field in init_fields(owner) if field.name == name)
    if isinstance(written, str) and _in_unit(annotation, "s"):
        unit = "(s|secs?|seconds?|m|mins?|minutes?|h|hrs?|hours?|d|days?)"
        if found := re.fullmatch(rf"([0-9]+(?:\.[0-9]+)?)\s*{unit}", written):
            factor = {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2][0]]
            return f"seconds: write {float(found[1]) * factor:g}"
    guesses = [*_guesses(annotation, written)]
    guesses += [1] * (written is True and default == 0)  # off, as `false` would be
    if isinstance(written, float) and not fits(adapter(owner), name, "?"):  # not any text
        guesses = [f"{inline(written)} epochs", *guesses]
    for value in guesses:
        if fits(adapter(owner), name, value):
            return f"write `{name}: {inline(value)}`"
    # the value may mean nothing
    several = isinstance(default, list | tuple) and isinstance(written, int | float)
    has_one = default is not dataclasses.MISSING and not dataclasses.is_dataclass(default)
    if not has_one or not (written is None or several):
        return ""
    return f"leave it out for the default, {inline(default)}"


def owners_of(kind: type, path: KeyPath) -> list[type]:
    """Return the dataclasses that a key at `path` of `kind` may be a field of."""
    owners = [kind]
    for part in path[:-1]:
        if isinstance(part, str):
            hints = [field_types(owner).get(part) for owner in owners]
            owners = [found for hint in hints for found in dataclasses_in(hint)]
    return owners


def owner_of(kind: type, path: KeyPath) -> type | None:
    """Return the dataclass that has the field at `path` of `kind`; None without such a field."""
    return next((one for one in owners_of(kind, path) if path[-1] in field_types(one)), None)


def _in_unit(annotation: Any, unit: str) -> bool:
    """Whether a field is a quantity in this unit, by its annotation."""
    marked = Unit(unit) in getattr(annotation, "__metadata__", ())
    return marked or any(_in_unit(one, unit) for one in get_args(annotation))


def _guesses(annotation: Any, written: Any) -> Iterator[Any]:
    """Values that somebody who wrote `written` may mean."""
    if isinstance(written, float) and written.is_integer():
        yield int(written)
    if written is False:
        yield None
    if not isinstance(written, list | dict) and written is not None:
        yield [written]
    for block in dataclasses_in(annotation):
        if written is True:
            yield {}
        names = [field.name for field in init_fields(block)]
        numbers = re.split(r"\s*[:,x-]\s*", written) if isinstance(written, str) else []
        if len(numbers) == len(names) > 1 and all(one.isdecimal() for one in numbers):
            yield dict(zip(names, map(int, numbers), strict=True))
        given = {f.name for f in init_fields(block) if default_of(f) is dataclasses.MISSING}
        yield from ({name: written} for name in sorted(names, key=lambda one: one not in given))
        if written is True:
            yield {name: 2 for name in names if name in given}


def fits(adapter: TypeAdapter[Any], name: str, value: Any) -> bool:
    """Whether a field can have the value, whatever other fields lack."""
    try:
        adapter.validate_json(json.dumps({name: value}), strict=True)
    except ValidationError as error:
        return all(one["loc"][:1] != (name,) for one in error.errors(include_url=False))
    except ValueError:
        return False
    return True

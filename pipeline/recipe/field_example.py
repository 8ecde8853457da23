"""Examples of values for fields whose value is of the wrong type."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, get_args

from annotated_types import Unit
from pydantic import TypeAdapter, ValidationError

from pipeline.contracts.signature import dataclasses_in, default_of, field_types, init_fields
from pipeline.recipe.dump import inline
from pipeline.recipe.nodes import KeyPath
from pipeline.recipe.scalars import in_seconds

_NONE = dataclasses.MISSING
Adapter = Callable[[type], TypeAdapter[Any]]
"""A dataclass -> what validates it."""


def example(kind: type, path: KeyPath, written: Any, adapter: Adapter) -> str:
    """Return a hint with a value that the field at `path` of the dataclass `kind` can have, as
    close to the written one as possible; empty if there is none to name."""
    owner = owner_of(kind, path)
    if owner is None:
        return ""
    name = str(path[-1])
    annotation = field_types(owner)[name]
    if isinstance(written, str) and _in_unit(annotation, "s"):
        seconds = in_seconds(written)
        if seconds:
            return seconds
    guesses = _guesses(annotation, written)
    if written is True and _default(owner, name) == 0:  # off, as `false` would be
        guesses = itertools.chain(guesses, [1])
    if isinstance(written, float) and not fits(adapter(owner), name, "?"):  # not any text
        guesses = itertools.chain([f"{inline(written)} epochs"], guesses)
    for value in guesses:
        if fits(adapter(owner), name, value):
            return f"write `{name}: {inline(value)}`"
    # the value may mean nothing
    default = _default(owner, name)
    several = isinstance(default, list | tuple) and isinstance(written, int | float)
    if default is _NONE or dataclasses.is_dataclass(default) or not (written is None or several):
        return ""
    return f"leave it out for the default, {inline(default)}"


def owner_of(kind: type, path: KeyPath) -> type | None:
    """Return the dataclass that has the field at `path` of `kind`; None without such a field."""
    for part in path[:-1]:
        found = next(iter(dataclasses_in(field_types(kind).get(str(part)))), None)
        if found is None:
            return None
        kind = found
    return kind if path[-1] in field_types(kind) else None


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
        fields = init_fields(block)
        numbers = re.split(r"\s*[:,x-]\s*", written) if isinstance(written, str) else []
        if len(numbers) == len(fields) > 1 and all(one.isdecimal() for one in numbers):
            yield {one.name: int(number) for one, number in zip(fields, numbers, strict=True)}
        fields = sorted(init_fields(block), key=lambda field: default_of(field) is not _NONE)
        yield from ({field.name: written} for field in fields)
        if written is True:
            yield {field.name: 2 for field in fields if default_of(field) is _NONE}


def fits(adapter: TypeAdapter[Any], name: str, value: Any) -> bool:
    """Whether a field can have the value, whatever other fields lack."""
    try:
        adapter.validate_json(json.dumps({name: value}), strict=True)
    except ValidationError as error:
        return all(one["loc"][:1] != (name,) for one in error.errors(include_url=False))
    except ValueError:
        return False
    return True


def _default(owner: type, name: str) -> Any:
    return next(default_of(one) for one in init_fields(owner) if one.name == name)

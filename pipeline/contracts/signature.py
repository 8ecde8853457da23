"""Read what a stage needs and returns from its `run` annotations."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pipeline.errors import PluginError


class Need(NamedTuple):
    """One artifact parameter of a stage's `run`."""

    parameter: str
    type: type
    optional: bool


@functools.cache
def _annotations(stage: type, method: str = "run") -> dict[str, Any]:
    function = getattr(stage, method, None)
    if not callable(function):
        raise PluginError(f"{name_of(stage)} has no method `{method}`")
    try:
        return typing.get_type_hints(function)
    except Exception as error:
        raise PluginError(
            f"{name_of(stage)}.{method}: its annotations cannot be resolved: {error}",
            hint="import artifact types outside TYPE_CHECKING",
        ) from error


@functools.cache
def needs(stage: type, method: str = "run") -> tuple[Need, ...]:
    """Parameters of a method after `self` and `ctx`, in order. `X | None` is optional.

    Raises PluginError when a parameter is not annotated with a class."""
    hints, found = _annotations(stage, method), []
    for name in list(inspect.signature(getattr(stage, method)).parameters)[2:]:
        union = typing.get_origin(hints.get(name)) in (types.UnionType, typing.Union)
        options = typing.get_args(hints.get(name)) if union else (hints.get(name),)
        kinds = [option for option in options if option is not type(None)]
        if len(kinds) != 1 or kinds[0] is Any or not isinstance(kinds[0], type):
            raise PluginError(
                f"{name_of(stage)}.{method}: parameter `{name}` "
                "is not annotated with one artifact class"
            )
        found.append(Need(name, kinds[0], len(kinds) < len(options)))
    return tuple(found)


def gives(stage: type) -> type | None:
    """The class of what `run` returns; None when it returns nothing. Raises PluginError where that
    is not annotated: no slot would take the result, and nothing would say so."""
    hints = _annotations(stage)
    if "return" not in hints:
        raise PluginError(
            f"{name_of(stage)}.run: its return annotation is missing",
            hint="write the class that it returns, or `-> None`",
        )
    given = hints["return"]
    if given is None or given is type(None):
        return None
    if not isinstance(given, type):
        raise PluginError(f"{name_of(stage)}.run: its return annotation is not one class")
    return given


def init_fields(kind: type) -> list[dataclasses.Field[Any]]:
    """The fields that a recipe may set."""
    return [field for field in dataclasses.fields(kind) if field.init]


@functools.cache
def field_types(kind: type) -> Mapping[str, Any]:
    """Each field's resolved annotation, with its bounds. Raises PluginError if one has none."""
    try:
        hints = typing.get_type_hints(kind, include_extras=True)
    except Exception as error:
        raise PluginError(f"{name_of(kind)}: a field's type cannot be resolved: {error}") from error
    return {field.name: hints[field.name] for field in init_fields(kind)}


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The field's default; `dataclasses.MISSING` when it must be given."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def dataclasses_in(annotation: Any) -> Iterator[type]:
    """The dataclasses that a value of this type may be or hold."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        yield annotation
    if typing.get_origin(annotation) is not typing.Literal:
        for arg in typing.get_args(annotation):
            yield from dataclasses_in(arg)


def name_of(kind: type) -> str:
    """Module and class, for messages."""
    return f"{kind.__module__}.{kind.__qualname__}"

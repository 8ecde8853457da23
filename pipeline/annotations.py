"""What can be read off a dataclass's fields and their types."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.errors import PluginError


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

"""A stage's fields described for people: type, default, range, doc."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Any

from pydantic.fields import FieldInfo

from pipeline.contracts.signature import dataclasses_in, default_of, field_types, init_fields
from pipeline.recipe.dump import inline
from pipeline.recipe.fields import field_docs

_BOUNDS = {
    "ge": ">= {}",
    "gt": "> {}",
    "le": "<= {}",
    "lt": "< {}",
    "multiple_of": "multiple of {}",
    "min_length": "at least {} long",
    "max_length": "at most {} long",
    "pattern": "matches {}",
}
_WORDS = {"str": "text", "NoneType": "null", "PosixPath": "path", "Path": "path", "Any": "anything"}


@dataclass(frozen=True, kw_only=True)
class FieldRow:
    """One field. `default` is None when the field must be given."""

    name: str
    type: str
    default: str | None
    range: str
    doc: str


def field_rows(kind: type, prefix: str = "") -> list[FieldRow]:
    """Every field of the dataclass `kind`; fields of a dataclass within it follow, dotted."""
    rows = []
    docs, annotations = field_docs(kind), field_types(kind)
    for field in init_fields(kind):
        annotation, default = annotations[field.name], default_of(field)
        rows.append(
            FieldRow(
                name=prefix + field.name,
                type=type_name(annotation),
                default=None if default is dataclasses.MISSING else inline(plain_value(default)),
                range=", ".join(dict.fromkeys(_bounds(annotation))),
                doc=" ".join(docs.get(field.name, "").split()),
            )
        )
        for below in dataclasses_in(annotation):
            rows += field_rows(below, f"{prefix}{field.name}.")
    return rows


def plain_value(value: Any) -> Any:
    """A field's value as a recipe would write it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in init_fields(type(value))]
        return {name: plain_value(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): plain_value(child) for key, child in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(plain_value, value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain_value(child) for child in value]
    return str(value) if isinstance(value, PurePath) else value


def type_name(annotation: Any) -> str:
    """The type in a recipe's words: `int | null`, `list of path`, `a | b`."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return type_name(args[0])
    if origin is typing.Literal:
        return " | ".join(map(inline, args))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_name(arg) for arg in args)
    inner = [type_name(arg) for arg in args if arg is not Ellipsis]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"mapping of {inner[-1]}" if inner else "mapping"
    if origin is not None:
        return f"list of {' | '.join(dict.fromkeys(inner))}"
    name = getattr(annotation, "__name__", str(annotation))
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return "mapping"
    return _WORDS.get(name, name)


def _bounds(annotation: Any) -> Iterator[str]:
    if isinstance(annotation, FieldInfo):
        for constraint in annotation.metadata:
            yield from _bounds(constraint)
    for name, text in _BOUNDS.items():
        bound = getattr(annotation, name, None)
        if bound is not None and not callable(bound):
            yield text.format(bound)
    if typing.get_origin(annotation) is Annotated:
        for constraint in annotation.__metadata__:
            yield from _bounds(constraint)
    if typing.get_origin(annotation) is not typing.Literal:
        for arg in typing.get_args(annotation):
            yield from _bounds(arg)

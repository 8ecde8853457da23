"""The fields of a stage: data -> an instance or every problem in it, and what people and editors
read of them.

pydantic validates the plain dataclass, strictly. Data is validated as JSON, in which text becomes a
path and a list a tuple, but "8" is not a number and 1 is not a boolean."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, PydanticSchemaGenerationError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from pipeline.contracts.signature import (
    dataclasses_in,
    default_of,
    field_types,
    init_fields,
    name_of,
)
from pipeline.errors import PluginError, Problem
from pipeline.recipe.dump import inline
from pipeline.recipe.field_errors import to_problems
from pipeline.recipe.nodes import KeyPath, Node

T = TypeVar("T")
BOUNDS = {
    "ge": ">= {}",
    "gt": "> {}",
    "le": "<= {}",
    "lt": "< {}",
    "multiple_of": "multiple of {}",
    "min_length": "at least {} long",
    "max_length": "at most {} long",
    "pattern": "matches {}",
}
WORDS = {"str": "text", "NoneType": "null", "PosixPath": "path", "Path": "path", "Any": "anything"}


def build(
    kind: type[T], data: Mapping[str, Any], *, tree: Node, path: KeyPath
) -> tuple[T | None, list[Problem]]:
    """An instance of the dataclass `kind` from plain values that were written at `path`, or None
    and everything that is wrong with them. Raises PluginError when `kind` itself is at fault."""
    try:
        validated: T = adapter(kind).validate_json(json.dumps(data), strict=True)  # type: ignore[arg-type]
        return validated, []
    except ValidationError as error:
        errors = error.errors(include_url=False)
        return None, to_problems(errors, kind, data, tree, path, adapter=adapter)


@functools.cache
def adapter(kind: type) -> TypeAdapter[Any]:
    """Validates JSON into the dataclass `kind`, and knows its JSON Schema."""
    try:
        _make_strict(kind)
        return TypeAdapter(kind)
    except PluginError:
        raise
    except Exception as error:
        unfit = [f"field `{key}`: the type {name}" for key, name in _unfit(kind)]
        why = f"{'; '.join(unfit)} cannot be written in a recipe" if unfit else ""
        why = why or f"its fields cannot be understood: {error}"
        hint = "use numbers, texts, lists, mappings, dataclasses" if unfit else ""
        raise PluginError(f"{name_of(kind)}: {why}", hint=hint) from error


def _make_strict(kind: type) -> None:
    """Have pydantic refuse other keys and types in a dataclass and in those in its fields."""
    kind.__pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[attr-defined]
    for annotation in field_types(kind).values():
        for inner in dataclasses_in(annotation):
            _make_strict(inner)


def _unfit(kind: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Keys of the fields that no recipe can hold, with the names of the types that are at fault."""
    for name, annotation in field_types(kind).items():
        blocks = dataclasses_in(annotation)
        inner = [one for block in blocks for one in _unfit(block, f"{prefix}{name}.")]
        yield from inner
        try:
            TypeAdapter(annotation)
        except PydanticSchemaGenerationError as error:
            found = re.search(r"schema for (?:<class ')?(.+?)(?:'>|\[|\. Set)", str(error))
            if not inner and found is not None:
                yield f"{prefix}{name}", found[1].rpartition(".")[2]
        except Exception:  # it means something only next to other types
            continue


@functools.cache
def field_docs(kind: type) -> Mapping[str, str]:
    """The string literal under each field, base classes' included; empty without source code."""
    docs: dict[str, str] = {}
    for base in filter(dataclasses.is_dataclass, reversed(kind.__mro__)):
        with contextlib.suppress(OSError, TypeError, SyntaxError):
            tree: Any = ast.parse(textwrap.dedent(inspect.getsource(base)))
            for statement, below in itertools.pairwise(tree.body[0].body):
                match statement, below:
                    case ast.AnnAssign(ast.Name(field)), ast.Expr(ast.Constant(str(text))):
                        docs[field] = inspect.cleandoc(text)
    return docs


class WithDocs(GenerateJsonSchema):
    """The schema of a dataclass with its fields' defaults and docs, which source code has."""

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        found, kind = super().dataclass_schema(schema), schema["cls"]
        docs = field_docs(kind)
        for field in init_fields(kind):
            own = found["properties"][field.name]
            if field.default_factory is not dataclasses.MISSING:
                own["default"] = self.encode_default(field.default_factory())
            if doc := docs.get(field.name):
                own["description"] = doc
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldRow:
    """One field, described for people. `default` is None when the field must be given."""

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
        value = {field.name: getattr(value, field.name) for field in init_fields(type(value))}
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
    inner = [type_name(arg) for arg in args if arg is not Ellipsis]
    if origin in (typing.Union, types.UnionType):
        return " | ".join(inner)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"mapping of {inner[-1]}" if inner else "mapping"
    if origin is not None:
        return f"list of {' | '.join(dict.fromkeys(inner))}"
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return "mapping"
    name = getattr(annotation, "__name__", str(annotation))
    return WORDS.get(name, name)


def _bounds(annotation: Any) -> Iterator[str]:
    """The bounds in an annotation, or of one of its constraints, in words."""
    for name, text in BOUNDS.items():
        bound = getattr(annotation, name, None)
        if bound is not None and not callable(bound):
            yield text.format(bound)
    below = list(annotation.metadata if isinstance(annotation, FieldInfo) else ())
    if typing.get_origin(annotation) is Annotated:
        below += annotation.__metadata__
    if typing.get_origin(annotation) is not typing.Literal:
        below += typing.get_args(annotation)
    for one in below:
        yield from _bounds(one)

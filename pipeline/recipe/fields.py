"""Data -> a stage, or every problem in it.

pydantic validates the plain dataclass, strictly. Data is validated as JSON, in which text becomes a
path and a list a tuple, but "8" is not a number and 1 is not a boolean."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, PydanticSchemaGenerationError, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from pipeline.contracts.signature import dataclasses_in, field_types, init_fields, name_of
from pipeline.errors import PluginError, Problem
from pipeline.recipe.field_errors import to_problems
from pipeline.recipe.nodes import KeyPath, SourceMap

T = TypeVar("T")


def build(
    kind: type[T], data: Mapping[str, Any], *, places: SourceMap, path: KeyPath
) -> tuple[T | None, list[Problem]]:
    """An instance of the dataclass `kind` from plain values that were written at `path`, or None
    and everything that is wrong with them. Raises PluginError when `kind` itself is at fault."""
    try:
        validated: T = adapter(kind).validate_json(json.dumps(data), strict=True)  # type: ignore[arg-type]
        return validated, []
    except ValidationError as error:
        return None, to_problems(
            error.errors(include_url=False), kind, data, places, path, adapter=adapter
        )


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
    """Have pydantic refuse other keys and types in a dataclass, and in the dataclasses of its
    fields."""
    kind.__pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[attr-defined]
    for annotation in field_types(kind).values():
        for inner in dataclasses_in(annotation):
            _make_strict(inner)


def _unfit(kind: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Keys of the fields whose types no recipe can hold, with the names of the types."""
    for name, annotation in field_types(kind).items():
        for inner in _innermost(annotation):
            if isinstance(inner, type) and dataclasses.is_dataclass(inner):
                yield from _unfit(inner, f"{prefix}{name}.")
            elif not _is_fit(inner):
                yield f"{prefix}{name}", getattr(inner, "__name__", str(inner))


def _innermost(annotation: Any) -> Iterator[Any]:
    """The types in an annotation. A class with arguments that holds them in no way that pydantic
    knows, such as an array, stands for them."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        yield from _innermost(args[0])
    elif origin in (None, typing.Literal):
        yield annotation
    elif origin not in (typing.Union, types.UnionType) and not _is_fit(origin):
        yield origin
    else:
        for arg in args:
            yield from _innermost(arg)


def _is_fit(annotation: Any) -> bool:
    try:
        TypeAdapter(annotation)
    except PydanticSchemaGenerationError:
        return annotation is Ellipsis
    except Exception:  # it means something only next to other types
        return True
    return True


@functools.cache
def field_docs(kind: type) -> Mapping[str, str]:
    """The string literal under each field, base classes' included; empty without source code."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            docs.update(_docs_in(base))
    return docs


def _docs_in(kind: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return {}
    definition = tree.body[0]
    docs: dict[str, str] = {}
    if isinstance(definition, ast.ClassDef):
        for statement, below in zip(definition.body, definition.body[1:], strict=False):
            target = statement.target if isinstance(statement, ast.AnnAssign) else None
            match below:
                case ast.Expr(ast.Constant(str(text))) if isinstance(target, ast.Name):
                    docs[target.id] = inspect.cleandoc(text)
    return docs


class WithDocs(GenerateJsonSchema):
    """The schema of a dataclass with the docs and the defaults of its fields, for which source code
    is read."""

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

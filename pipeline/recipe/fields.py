"""A stage's fields -> a pydantic model, and data -> a stage or every problem in it.

The dataclass stays plain; a strict model with the same fields is built beside it. Data is validated
as JSON, in which text becomes a path and a list a tuple, but "8" is no number and 1 is no boolean.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PydanticSchemaGenerationError,
    TypeAdapter,
    ValidationError,
    create_model,
)

from pipeline.contracts.signature import default_of, field_types, init_fields, name_of
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
        return TypeAdapter(_as_model(kind))
    except PluginError:
        raise
    except Exception as error:
        unfit = [f"field `{key}`: the type {name}" for key, name in _unfit(kind)]
        why = f"{'; '.join(unfit)} cannot be written in a recipe" if unfit else ""
        why = why or f"its fields cannot be understood: {error}"
        hint = "use numbers, texts, lists, mappings, dataclasses" if unfit else ""
        raise PluginError(f"{name_of(kind)}: {why}", hint=hint) from error


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


def _as_model(kind: type) -> Any:
    return Annotated[_model(kind), AfterValidator(_constructor(kind))]


@functools.cache
def _model(kind: type) -> type[BaseModel]:
    annotations = field_types(kind)
    definitions: dict[str, Any] = {}
    for field in init_fields(kind):
        default = default_of(field)
        info = Field(
            default=... if default is dataclasses.MISSING else default,
            alias=field.name,
            json_schema_extra=functools.partial(_describe, kind, field.name),
        )
        # prefixed, because BaseModel has names of its own (`json`, `copy`)
        definitions[f"field_{field.name}"] = (_rewrite(annotations[field.name]), info)
    config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    doc = inspect.cleandoc(kind.__doc__ or "")
    return create_model(kind.__name__, __config__=config, __doc__=doc, **definitions)


def _describe(kind: type, name: str, schema: dict[str, Any]) -> None:
    """Add a field's doc to its schema, for which source code is read: only if that is asked for."""
    if doc := field_docs(kind).get(name):
        schema["description"] = doc


def _constructor(kind: type[T]) -> Callable[[BaseModel], T]:
    def construct(model: BaseModel) -> T:
        given = {name: getattr(model, name) for name in model.model_fields_set}
        return kind(**{name.removeprefix("field_"): value for name, value in given.items()})

    return construct


def _rewrite(annotation: Any) -> Any:
    """The annotation with every dataclass in it replaced by its strict model."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return _as_model(annotation)
    if origin is None or origin is typing.Literal:
        return annotation
    if origin is Annotated:
        return Annotated[(_rewrite(args[0]), *args[1:])]
    rewritten = tuple(arg if arg is Ellipsis else _rewrite(arg) for arg in args)
    if origin in (typing.Union, types.UnionType):
        return typing.Union[rewritten]  # noqa: UP007 - built at run time
    return origin[rewritten]

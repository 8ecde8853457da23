"""Find what a stage's class declares wrongly, and what it answers wrongly to fields."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import typing
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from pipeline.chain.artifacts import wrong_artifact
from pipeline.chain.entry_points import line_in
from pipeline.contracts.engine import Engine
from pipeline.contracts.signature import (
    dataclasses_in,
    default_of,
    field_types,
    gives,
    init_fields,
    needs,
)
from pipeline.contracts.stage import Context
from pipeline.errors import PluginError, Problem
from pipeline.planning.planner import Planners
from pipeline.planning.presets import presets
from pipeline.recipe.fields import adapter, field_docs, plain_value
from pipeline.testing.helpers import checked, make


def in_name(stage: type, name: str) -> Iterator[str]:
    """A name is `kind.name`, and stages of a known kind give the kind's artifact."""
    kind, _, rest = name.partition(".")
    if not all(part.isidentifier() and part.islower() for part in (kind, rest)):
        yield f"its name `{name}` is not kind.name in lower-case letters, digits and underscores"
    wrong = wrong_artifact(stage, name)
    if wrong:
        yield wrong


def in_run(stage: Any) -> Iterator[str]:
    """`run(self, ctx: Context, ...)` takes artifacts by name and declares what it returns."""
    hints = typing.get_type_hints(stage.run)
    parameters = list(inspect.signature(stage.run).parameters.values())
    if len(parameters) < 2 or hints.get(parameters[1].name) is not Context:
        yield "run: the first parameter after `self` is not annotated with Context"
    for parameter in parameters[2:]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            yield f"run: `{parameter.name}` cannot be given by name"
    taken = [(f"`{need.parameter}`", need.type) for need in needs(stage)]
    for what, kind in [*taken, ("its result", gives(stage))]:
        if kind is not None and kind.__module__ in ("builtins", "typing"):
            yield f"run: {what} is of the type {kind.__name__}, which says nothing of its role"


def in_fields(stage: type) -> Iterator[str]:
    """Every field, at any depth, is documented and understood, and accepts its own default."""
    unfit: list[str] = []
    for prefix, kind in _nested(stage):
        docs, names = field_docs(kind), [field.name for field in init_fields(kind)]
        for name in (name for name in names if name not in docs):
            unfit.append(f"field `{prefix}{name}` has no string under it that says what it is")
        unfit += _unwritable_defaults(kind, prefix)
    try:
        adapter(stage).json_schema()
    except PluginError as error:
        unfit.append(str(error))
    except Exception as error:
        unfit.append(f"there is no JSON Schema of its fields: {error}")
    yield from unfit
    if not unfit:
        # Python does not hold a default to its field's bounds; a recipe with the default would be
        for prefix, kind in _nested(stage):
            defaults = _defaults(kind)
            for problem in make(kind, defaults)[1]:
                if problem.key.partition(".")[0] in defaults:
                    key = f"{prefix}{problem.key}"
                    yield f"the default of field `{key}` is refused: {problem.message}"


def _nested(stage: type, prefix: str = "") -> Iterator[tuple[str, type]]:
    """The class and the dataclasses in its fields, each with the prefix of its fields' keys."""
    yield prefix, stage
    for name, annotation in field_types(stage).items():
        for below in dataclasses_in(annotation):
            yield from _nested(below, f"{prefix}{name}.")


def _unwritable_defaults(kind: type, prefix: str) -> Iterator[str]:
    for name, default in _defaults(kind).items():
        try:
            json.dumps(default)
        except TypeError as error:
            yield f"the default of field `{prefix}{name}` cannot be written in a recipe: {error}"


def _defaults(kind: type) -> dict[str, Any]:
    """Defaults as in a recipe, of the fields that have one."""
    found = {field.name: default_of(field) for field in init_fields(kind)}
    return {n: plain_value(v) for n, v in found.items() if v is not dataclasses.MISSING}


def with_valid(stage: type, valid: Mapping[str, Any]) -> Iterator[str]:
    """Valid fields are accepted, and values written out mean the same."""
    made, found = make(stage, valid)
    if made is None:
        yield f"valid fields are refused: {_listed(found)}"
        return
    if found := (yield from _checked(made)):
        yield f"check refuses valid fields: {_listed(found)}"
    try:  # the journal recognizes a finished stage by this
        json.dumps(dataclasses.asdict(made), sort_keys=True, default=os.fspath)
    except Exception as error:
        fit = "use numbers, text, paths, tuples and mappings of them"
        yield f"its values have no stable JSON form: {error} ({fit})"
        return
    again, found = make(stage, plain_value(made))  # as `pipe show` prints them
    if again is None:
        yield f"its values are refused when written out in full: {_listed(found)}"
    elif again != made:
        yield "is not equal to a stage of the same values"


def with_invalid(stage: type, key: str, invalid: Mapping[str, Any]) -> Iterator[str]:
    """Fields with a mistake at `key` are refused there."""
    made, found = make(stage, invalid)
    if made is not None:
        found = yield from _checked(made)
    if not found:
        yield f"invalid fields are accepted: {dict(invalid)!r}"
    elif all(problem.key != key for problem in found):
        yield f"{dict(invalid)!r} has no problem at `{key}`, but: {_listed(found)}"


def in_presets(stage: Any, use: str) -> Iterator[str]:
    """Each strategy that the stage's planner offers is a slot without mistakes."""
    offered, given = presets(Planners.installed(), use), gives(stage)
    if offered and (given is None or not issubclass(given, Engine)):
        yield "has presets, which are for stages that give an Engine"
    for name, preset in offered.items():
        if found := make(stage, preset.fields)[1]:
            yield f"its preset `{name}` is refused: {_listed(found)}"


def _checked(made: Any) -> Generator[str, None, list[Problem]]:
    """Yield the violations of `check`; return the problems that it finds."""
    try:
        found: list[Any] = list(checked(made))
    except Exception as error:
        line = line_in(error, type(made).__module__)
        at = f", at {line}" if line else ""
        yield f"check raised {type(error).__name__} instead of yielding a Problem: {error}{at}"
        return []
    for each in found:
        if not isinstance(each, Problem):
            yield f"check yields {type(each).__name__} instead of Problem"
    return [each for each in found if isinstance(each, Problem)]


def _listed(found: list[Problem]) -> str:
    return "; ".join(str(dataclasses.replace(each, location=None)) for each in found)

"""What a stage's class declares, against what every stage must declare."""

from __future__ import annotations

import dataclasses
import inspect
import json
import typing
from collections.abc import Iterator
from typing import Any

from pipeline.contracts.data import Data
from pipeline.contracts.engine import Engine
from pipeline.contracts.export import ExportedModel
from pipeline.contracts.model import ModelSource
from pipeline.contracts.optimizer import OptimizerPlan
from pipeline.contracts.precision import Precision
from pipeline.contracts.signature import dataclasses_in, field_types, gives, init_fields, needs
from pipeline.contracts.stage import Context
from pipeline.contracts.tensors import Weights
from pipeline.contracts.training import Checkpoints, TrainedRun
from pipeline.plan.registry import kind_of
from pipeline.recipe.field_docs import plain_value
from pipeline.recipe.fields import adapter, default_of, field_docs
from pipeline.testing.helpers import make

KINDS: dict[str, type] = {
    "model": ModelSource,
    "adapter": ModelSource,
    "precision": Precision,
    "data": Data,
    "optimizer": OptimizerPlan,
    "wrap": Engine,
    "checkpoint": Checkpoints,
    "train": TrainedRun,
    "consolidate": Weights,
    "export": ExportedModel,
}
"""What stages of the known kinds give. A new kind may give anything."""


def name_violations(stage: type, name: str) -> Iterator[str]:
    """A name is `kind.name`; stages of one kind are offered in each other's place."""
    kind, _, rest = name.partition(".")
    if not all(part.isidentifier() and part.islower() for part in (kind, rest)):
        yield f"its name `{name}` is not kind.name in lower-case letters, digits and underscores"
    given, wanted = gives(stage), KINDS.get(kind)
    if wanted is not None and (given is None or not issubclass(given, wanted)):
        shown = given.__name__ if given else "nothing"
        fitting = [other for other, kind in KINDS.items() if given and issubclass(given, kind)]
        hint = f" (call it {' or '.join(f'{other}.{rest}' for other in fitting)})"
        yield (
            f"is called `{name}`, but {kind_of(name)} stages give {wanted.__name__}, and it gives "
            f"{shown}{hint if fitting else ''}"
        )


def run_violations(stage: Any) -> Iterator[str]:
    """`run(self, ctx: Context, ...)` takes artifacts by name and says what it gives."""
    hints = typing.get_type_hints(stage.run)
    parameters = list(inspect.signature(stage.run).parameters.values())
    if len(parameters) < 2 or hints.get(parameters[1].name) is not Context:
        yield "run: the first parameter after `self` is not annotated with Context"
    if "return" not in hints:
        yield "run: the return annotation is missing (write `-> None` if it gives nothing)"
    for parameter in parameters[2:]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            yield f"run: `{parameter.name}` cannot be given by name"
    taken = [(f"`{need.parameter}`", need.type) for need in needs(stage)]
    for what, kind in [*taken, ("what it gives", gives(stage))]:
        if kind is not None and kind.__module__ in ("builtins", "typing"):
            yield f"run: {what} is of the type {kind.__name__}, which says nothing of its role"


def field_violations(stage: type) -> Iterator[str]:
    """Every field, at any depth, is documented, understood, and accepts its own default."""
    unfit: list[str] = []
    for prefix, kind in _with_inner(stage):
        unfit += [*_undocumented(kind, prefix), *_unwritable_defaults(kind, prefix)]
    try:
        adapter(stage).json_schema()
    except Exception as error:
        unfit.append(f"there is no JSON Schema of its fields: {error}")
    yield from unfit
    if not unfit:
        for prefix, kind in _with_inner(stage):
            yield from _refused_defaults(kind, prefix)


def _with_inner(stage: type, prefix: str = "") -> Iterator[tuple[str, type]]:
    """The class, and the dataclasses that its fields hold, with where they are."""
    yield prefix, stage
    for name, annotation in field_types(stage).items():
        for below in dataclasses_in(annotation):
            yield from _with_inner(below, f"{prefix}{name}.")


def _undocumented(kind: type, prefix: str) -> Iterator[str]:
    docs = field_docs(kind)
    for field in init_fields(kind):
        if field.name not in docs:
            yield f"field `{prefix}{field.name}` has no string under it that says what it is"


def _unwritable_defaults(kind: type, prefix: str) -> Iterator[str]:
    for name, default in _defaults(kind).items():
        try:
            json.dumps(default)
        except TypeError as error:
            yield f"the default of field `{prefix}{name}` cannot be written in a recipe: {error}"


def _refused_defaults(kind: type, prefix: str) -> Iterator[str]:
    """Python does not hold a default to its field's bounds; a recipe that writes it out would."""
    defaults = _defaults(kind)
    for problem in make(kind, defaults)[1]:
        if problem.key.partition(".")[0] in defaults:
            yield f"the default of field `{prefix}{problem.key}` is refused: {problem.message}"


def _defaults(kind: type) -> dict[str, Any]:
    """Defaults as a recipe would write them, of the fields that have one."""
    found = {field.name: default_of(field) for field in init_fields(kind)}
    return {
        name: plain_value(default)
        for name, default in found.items()
        if default is not dataclasses.MISSING
    }

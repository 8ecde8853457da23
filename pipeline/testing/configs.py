"""What a stage makes of a slot's fields, without a recipe around them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from pipeline.annotations import dataclasses_in, field_types
from pipeline.errors import Location, Problem
from pipeline.field_table import plain_value
from pipeline.fields import build
from pipeline.marks import Marks
from pipeline.stage import PlanView


def plan_view(
    slots: Mapping[str, Any] | None = None, *, procs: int = 1, device: str = "cpu"
) -> PlanView:
    """What `check` is given: stages by slot, and how they will be launched."""
    return PlanView(name="test", seed=0, procs=procs, device=device, slots=slots or {})


def problems(
    stage: type, fields: Mapping[str, Any], *, plan: PlanView | None = None
) -> list[Problem]:
    """Everything wrong with a slot of these fields, `key` being relative to the slot.

    `fields` are as in a recipe: plain values. What is wrong with single fields comes alone; without
    any, the stage's `check` is asked, beside the slots of `plan`. Raises what `check` raises, and
    PluginError when the stage's fields cannot be understood.
    """
    made, found = made_of(stage, fields)
    if made is None or not hasattr(made, "check"):
        return found
    return list(made.check(plan or plan_view({"slot": made})))


def made_of(stage: type, fields: Mapping[str, Any]) -> tuple[Any, list[Problem]]:
    """The stage that these fields make, or None and what is wrong with them."""
    marks = Marks(keys={}, values={(): Location(file="fields")}, data=fields)
    return build(stage, fields, marks=marks, path=())


def config_violations(stage: type, valid: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the stage, if `valid` are good fields for it."""
    made, found = made_of(stage, valid)
    if made is None:
        yield f"valid fields are refused: {_listed(found)}"
        return
    yield from _check_violations(stage, valid)
    written = plain_value(made)
    again, found = made_of(stage, json.loads(json.dumps(written)))
    if again is None:
        yield f"its own values are refused when a recipe writes them out: {_listed(found)}"
    elif again != made:
        yield "is not equal to a stage of the same values"
    yield from _digest_violations(made)
    if not any(problem.key == "no_such_field" for problem in _refusals(stage, valid)):
        yield "an unknown field is not refused"


def refusal_violations(stage: type, key: str, invalid: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the stage, if `invalid` has a mistake at `key`."""
    try:
        found = problems(stage, invalid)
    except Exception as error:
        yield f"check raised {type(error).__name__} for {dict(invalid)!r}: {error}"
        return
    if not found:
        yield f"invalid fields are accepted: {dict(invalid)!r}"
    elif not any(problem.key == key for problem in found):
        yield f"invalid fields have no problem at `{key}`, but: {_listed(found)}"
    yield from _key_violations(stage, found, invalid)


def _check_violations(stage: type, valid: Mapping[str, Any]) -> Iterator[str]:
    try:
        found = problems(stage, valid)
    except Exception as error:
        yield f"check raised {type(error).__name__} instead of yielding a Problem: {error}"
        return
    strange = [each for each in found if not isinstance(each, Problem)]
    if strange:
        yield f"check yields {type(strange[0]).__name__} instead of Problem"
    elif found:
        yield f"check refuses valid fields: {_listed(found)}"
        yield from _key_violations(stage, found, valid)


def _key_violations(
    stage: type, found: list[Problem], fields: Mapping[str, Any]
) -> Iterator[str]:
    for problem in found:
        parts = problem.key.split(".") if problem.key else []
        if parts and parts[0] not in fields and not _names_field(stage, parts):
            yield f"a problem's key names no field: `{problem.key}`"


def _names_field(stage: type, parts: list[str]) -> bool:
    """Whether the dotted key leads to a field, as far as dataclasses go."""
    owners = [stage]
    for part in parts:
        types = [field_types(owner)[part] for owner in owners if part in field_types(owner)]
        if not types:
            return False
        owners = [below for each in types for below in dataclasses_in(each)]
        if not owners:
            return True
    return True


def _digest_violations(made: Any) -> Iterator[str]:
    """The journal recognises a finished stage by the JSON of its values."""
    try:
        json.dumps(dataclasses.asdict(made), sort_keys=True, default=_path_text)
    except Exception as error:
        yield f"its values have no stable JSON form: {error}"


def _path_text(value: Any) -> str:
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"{type(value).__name__} {value!r}; use numbers, text, paths, tuples, mappings")


def _refusals(stage: type, valid: Mapping[str, Any]) -> list[Problem]:
    return made_of(stage, {**valid, "no_such_field": 1})[1]


def _listed(found: list[Problem]) -> str:
    return "; ".join(str(dataclasses.replace(each, location=None)) for each in found)

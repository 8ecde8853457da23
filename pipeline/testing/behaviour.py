"""Faults of a stage with good and with bad fields, by what every stage must do."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from pipeline.contracts.engine import Engine
from pipeline.contracts.signature import dataclasses_in, field_types, gives
from pipeline.errors import PluginError, Problem
from pipeline.plan.registry import Entry, Registry
from pipeline.planning.planner import Planners
from pipeline.planning.presets import presets
from pipeline.recipe.field_docs import plain_value
from pipeline.testing.helpers import checked, make


def acceptance(stage: type, valid: Mapping[str, Any]) -> Iterator[str]:
    """Faults of the stage, `valid` being good fields for it."""
    made, found = make(stage, valid)
    if made is None:
        yield f"valid fields are refused: {_listed(found)}"
        return
    found = yield from _checked(made)
    if found:
        yield f"check refuses valid fields: {_listed(found)}"
    if not any(each.key == "no_such_field" for each in make(stage, _misspelt(valid))[1]):
        yield "an unknown field is not refused"
    unstable = list(_unstable(made))
    yield from unstable or _round_trip(stage, made)


def refusal(stage: type, key: str, invalid: Mapping[str, Any]) -> Iterator[str]:
    """Faults of the stage, `invalid` having a mistake at `key`."""
    made, found = make(stage, invalid)
    if made is not None:
        found = yield from _checked(made)
    if not found:
        yield f"invalid fields are accepted: {dict(invalid)!r}"
    elif all(problem.key != key for problem in found):
        yield f"{dict(invalid)!r} has no problem at `{key}`, but: {_listed(found)}"


def preset_faults(stage: Any, use: str) -> Iterator[str]:
    """Faults of the strategies that a stage's planner offers; each has to be a slot without
    mistakes."""
    offered, given = presets(Planners.installed(), use), gives(stage)
    if offered and (given is None or not issubclass(given, Engine)):
        yield "has presets, which are for stages that give an Engine"
    for name, preset in offered.items():
        found = make(stage, preset.fields)[1]
        if found:
            yield f"its preset `{name}` is refused: {_listed(found)}"


def _checked(made: Any) -> Generator[str, None, list[Problem]]:
    """Yields what is wrong with the check; returns the problems that it finds."""
    try:
        found: list[Any] = list(checked(made))
    except Exception as error:
        yield f"check raised {type(error).__name__} instead of yielding a Problem: {error}"
        return []
    for each in found:
        if not isinstance(each, Problem):
            yield f"check yields {type(each).__name__} instead of Problem"
        elif each.key and not _names_field(type(made), each.key.split(".")):
            yield f"check yields a problem whose key is no field: `{each.key}`"
    return [each for each in found if isinstance(each, Problem)]


def _names_field(stage: type, parts: list[str]) -> bool:
    """Whether a dotted key leads to a field, as far down as there are dataclasses."""
    owners = [stage]
    for part in parts:
        types = [field_types(owner)[part] for owner in owners if part in field_types(owner)]
        if not types:
            return part.isdecimal()
        owners = [below for each in types for below in dataclasses_in(each)]
        if not owners:
            return True
    return True


def _unstable(made: Any) -> Iterator[str]:
    """The journal knows a finished stage again by the JSON of its values."""
    try:
        json.dumps(dataclasses.asdict(made), sort_keys=True, default=_path_text)
    except Exception as error:
        yield f"its values have no stable JSON form: {error}"


def _path_text(value: Any) -> str:
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"{value!r}; use numbers, text, paths, tuples and mappings of them")


def _round_trip(stage: type, made: Any) -> Iterator[str]:
    """`pipe show` writes the values out, and they must mean the same again."""
    again, found = make(stage, plain_value(made))
    if again is None:
        yield f"its values are refused when written out in full: {_listed(found)}"
    elif again != made:
        yield "is not equal to a stage of the same values"


def _misspelt(valid: Mapping[str, Any]) -> dict[str, Any]:
    return {**valid, "no_such_field": 1}


def _listed(found: list[Problem]) -> str:
    return "; ".join(str(dataclasses.replace(each, location=None)) for each in found)


HEAVY = ("torch", "transformers", "deepspeed", "accelerate")
"""Packages that only `run` may import: they take seconds, and `pipe check` takes none."""


def _observe(value: str, configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Heavy packages by the moment at which they came."""
    at_start = _loaded()
    entry = Entry(name="the.stage", value=value, distribution="the package", version="")
    try:
        stage = Registry([entry]).load(entry.name)
        at_import = _loaded()
        for fields in configs:
            _try(stage, fields)
    except PluginError:
        return {"importing it": sorted(_loaded() - at_start)}
    return {
        "importing it": sorted(at_import - at_start),
        "checking it": sorted(_loaded() - at_import),
    }


def _try(stage: type, fields: Mapping[str, Any]) -> None:
    try:
        checked(make(stage, fields)[0])
    except Exception:
        return  # is told where the check's answers are looked at


def _loaded() -> set[str]:
    return {name for name in HEAVY if name in sys.modules}


if __name__ == "__main__":
    print(json.dumps(_observe(**json.load(sys.stdin))))

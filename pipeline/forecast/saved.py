"""A plan as a file, and whether what is about to run is what was planned."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.annotations import init_fields
from pipeline.errors import PlanDrift, UsageError, in_words
from pipeline.plan import Plan, Step

VERSION: Final = 2
SHOWN = 60
"""Characters of a value that a message shows; of a longer one it says only that it has changed."""

Count = Annotated[int, Field(ge=1)]


class Identity(BaseModel):
    """What a plan is a plan of: all that decides what a run does and takes."""

    model_config = ConfigDict(extra="ignore", strict=True)

    stages: dict[str, dict[str, Any]]
    """Slot -> `use` and every field with its checked value, defaults too. What comes from the
    environment stays as it is written."""
    seed: int
    device: Literal["cpu", "cuda"]
    processes: Count
    processes_per_node: Count | None
    """None where the launcher does not tell."""
    versions: dict[str, str]
    """Package -> its public version: the local part (`+cu126`) names the machine it was built for,
    and plans are made elsewhere than they are run."""


class SavedPlan(BaseModel):
    """What is read of a saved plan again."""

    model_config = ConfigDict(extra="ignore", strict=True)

    schema_version: Literal[2]
    identity: Identity


def identity(plan: Plan, per_node: int | None) -> Identity:
    """Of a checked recipe with so many processes on each node."""
    from pipeline.rundir import versions

    written = plan.recipe.public().get("stages") or {}
    folders = [f"{file.parent}/" for file in plan.recipe.source_files]

    def fields(step: Step) -> dict[str, Any]:
        shown: dict[str, Any] = _public(_plain(step.stage, folders), written[step.slot])
        return {"use": step.use, **shown}

    return Identity(
        stages={step.slot: fields(step) for step in plan.steps},
        seed=plan.recipe.seed,
        device="cpu" if plan.view.device == "cpu" else "cuda",
        processes=plan.view.procs,
        processes_per_node=per_node,
        versions={package: found.partition("+")[0] for package, found in versions().items()},
    )


def require_planned(plan: Plan, per_node: int | None, file: Path) -> None:
    """Raises PlanDrift, telling everything that differs, and UsageError for a file that is no
    plan."""
    planned, now = _read(file), identity(plan, per_node)
    if per_node is None:
        planned = planned.model_copy(update={"processes_per_node": None})
    found = list(_drift(planned, now))
    if found:
        raise PlanDrift(f"not what was planned in {file}: {'; '.join(found)}")


def _read(file: Path) -> Identity:
    try:
        return SavedPlan.model_validate_json(file.read_bytes()).identity
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {in_words(error)}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(
            f"{file} is no saved plan: {place}{': ' * bool(place)}{first['msg']}",
            hint=f"pipe plan RECIPE --out {file} writes one",
        ) from error


def _drift(planned: Identity, now: Identity) -> Iterator[str]:
    for slot in sorted({*planned.stages, *now.stages}):
        before, after = planned.stages.get(slot), now.stages.get(slot)
        if before is None or after is None:
            yield f"slot `{slot}` is {'new' if before is None else 'gone'}"
        elif before.get("use") != after["use"]:
            yield _told(f"{slot}.use", before.get("use"), after["use"])
        else:
            yield from _differences(slot, before, after)
    rest = {"stages", "versions"}
    yield from _differences("", planned.model_dump(exclude=rest), now.model_dump(exclude=rest))
    # A package that only one side has is an optional one, which the plan did without.
    for package in sorted(planned.versions.keys() & now.versions.keys()):
        yield from _differences(package, planned.versions[package], now.versions[package])


def _differences(place: str, before: Any, after: Any) -> Iterator[str]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted({*before, *after}):
            inner = f"{place}.{key}" if place else key
            yield from _differences(inner, before.get(key), after.get(key))
    elif before != after:
        yield _told(place, before, after)


def _told(place: str, before: Any, after: Any) -> str:
    shown = [json.dumps(value) for value in (after, before)]
    if max(map(len, shown)) > SHOWN:
        return f"{place} has changed"
    return f"{place} is {shown[0]} instead of {shown[1]}"


def _plain(value: Any, folders: Sequence[str]) -> Any:
    """A stage, or what is in one, as JSON knows it. Files beside the recipe are named from there,
    since another machine has them elsewhere."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name), folders) for f in init_fields(type(value))}
    if isinstance(value, Mapping):
        return {str(key): _plain(each, folders) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, folders) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if value is None or isinstance(value, int) or (isinstance(value, float) and isfinite(value)):
        return value
    text = str(value)
    beside = next((folder for folder in folders if text.startswith(folder)), "")
    return f"./{text.removeprefix(beside)}" if beside else text


def _public(value: Any, written: Any) -> Any:
    """The value, but what depends on an environment variable as it is written: it may be secret."""
    if "${" not in json.dumps(written, default=str):
        return value
    if isinstance(value, Mapping) and isinstance(written, Mapping):
        return {key: _public(each, written.get(key)) for key, each in value.items()}
    return written

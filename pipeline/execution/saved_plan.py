"""A plan as a file, and whether what is about to run is what was planned."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.chain.plan import Plan
from pipeline.errors import PlanDrift, UsageError, first_validation_error, in_words
from pipeline.recipe.fields import plain_value
from pipeline.recipe.load import reserved
from pipeline.recipe.nodes import mapped
from pipeline.utils.foreign import read_whole

VERSION: Final = 3
Count = Annotated[int, Field(ge=1)]


class Identity(BaseModel):
    """Everything in a plan that decides what a run computes and needs."""

    model_config = ConfigDict(extra="ignore", strict=True)

    stages: dict[str, dict[str, Any]]
    """Slot -> `use`, `takes` and every field with its checked value, defaults too. Values from the
    environment stay as written, and files next to a file of the recipe are named from `folder`."""
    folder: str
    """The recipe's folder, which `./` stands for. Not compared."""
    seed: int
    device: Literal["cpu", "cuda"]
    processes: Count
    processes_per_node: Count | None
    """Processes of each node; None where the launcher does not say."""
    versions: dict[str, str]
    """Package -> its public version: the local part (`+cu126`) names the machine it was built for,
    and plans are made elsewhere than they are run."""


class SavedPlan(BaseModel):
    """The part of a saved plan that is read again."""

    model_config = ConfigDict(extra="ignore", strict=True)

    schema_version: Literal[3]
    identity: Identity


def identity(plan: Plan, per_node: int | None) -> Identity:
    """Identity of a checked recipe with `per_node` processes on each node."""
    from pipeline.utils.packages import versions

    written = plan.recipe.public().get("stages") or {}
    folders = [str(file.parent) for file in plan.recipe.source_files]
    stages = {}
    for planned in plan.slots:
        own = written[planned.slot]
        fields = mapped(plain_value(planned.stage), lambda value: _portable(value, folders))
        stages[planned.slot] = {**reserved(own), **_public(fields, own)}
    return Identity(
        stages=stages,
        folder=folders[0],
        seed=plan.recipe.seed,
        device="cpu" if plan.view.device == "cpu" else "cuda",
        processes=plan.view.procs,
        processes_per_node=per_node,
        versions={package: found.partition("+")[0] for package, found in versions().items()},
    )


def _portable(value: Any, folders: Sequence[str]) -> Any:
    """A plain value as JSON knows it. A file next to one of the recipe's is named from the first
    folder, the recipe's own: another machine has them elsewhere."""
    if value is None or isinstance(value, int) or (isinstance(value, float) and isfinite(value)):
        return value
    text = str(value)
    if not any(text == folder or text.startswith(f"{folder}/") for folder in folders):
        return text
    name = os.path.relpath(text, folders[0])
    return f"{name}/" if name in (".", "..") else name if name[:3] == "../" else f"./{name}"


def _public(value: Any, written: Any) -> Any:
    """The value; if it depends on an environment variable, as written, since it may be secret."""
    if "${" not in json.dumps(written, default=str):
        return value
    if isinstance(value, Mapping) and isinstance(written, Mapping):
        return {key: _public(each, written.get(key)) for key, each in value.items()}
    return written


def require_planned(plan: Plan, per_node: int | None, file: Path) -> None:
    """Raise PlanDrift, listing everything that differs, and UsageError for a file that is not a
    plan."""
    try:
        planned = SavedPlan.model_validate_json(read_whole(file)).identity
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {in_words(error)}") from error
    except ValidationError as error:
        raise UsageError(
            f"{file} is not a saved plan: {first_validation_error(error)}",
            hint=f"pipe plan RECIPE --out {file} writes one",
        ) from error
    if per_node is None:
        planned = planned.model_copy(update={"processes_per_node": None})
    found = list(_differences(planned, identity(plan, per_node)))
    if found:
        raise PlanDrift(f"not what was planned in {file}: {'; '.join(found)}")


def _differences(planned: Identity, now: Identity) -> Iterator[str]:
    """Each difference in words, with both values."""
    for slot in sorted({*planned.stages, *now.stages}):
        before, after = planned.stages.get(slot), now.stages.get(slot)
        if before is None or after is None:
            yield f"slot `{slot}` is {'new' if before is None else 'gone'}"
        elif before.get("use") != after["use"]:
            yield from _between(f"{slot}.use", before.get("use"), after["use"])
        else:
            yield from _between(slot, before, after)
    rest = {"stages", "versions", "folder"}
    yield from _between("", planned.model_dump(exclude=rest), now.model_dump(exclude=rest))
    # A package that only one side has is an optional one, which the plan did without.
    for package in sorted(planned.versions.keys() & now.versions.keys()):
        yield from _between(package, planned.versions[package], now.versions[package])


def _between(place: str, before: Any, after: Any) -> Iterator[str]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted({*before, *after}):
            inner = f"{place}.{key}" if place else key
            yield from _between(inner, before.get(key), after.get(key))
    elif before != after:
        yield f"{place} is {json.dumps(after)} instead of {json.dumps(before)}"

"""A plan as a file, and whether what is about to run is what was planned."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import PlanDrift, UsageError
from pipeline.plan import Plan

VERSION = 1
SCHEMA, RECIPE, PROCS, VERSIONS = "schema_version", "recipe", "procs", "versions"


def identity(plan: Plan) -> dict[str, Any]:
    """What a plan is a plan of: the recipe, the number of processes, and the packages' versions."""
    from pipeline.rundir import versions

    return {
        SCHEMA: VERSION,
        "name": plan.recipe.name,
        RECIPE: {slot: _digest(value) for slot, value in _parts(plan).items()},
        PROCS: plan.view.procs,
        VERSIONS: versions(),
    }


def require_planned(plan: Plan, file: Path) -> None:
    """Raises PlanDrift, telling everything that differs, and UsageError for a file that is no
    plan."""
    try:
        planned = json.loads(file.read_text("utf-8"))
        known = planned[SCHEMA] == VERSION
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{file} is no saved plan: {error}") from error
    if not known:
        raise UsageError(f"{file} is of schema version {planned[SCHEMA]}, not {VERSION}")
    found = list(_differences(planned, identity(plan)))
    if found:
        raise PlanDrift(f"not what was planned in {file}: {'; '.join(found)}")


def _differences(planned: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for part in sorted({*planned[RECIPE], *now[RECIPE]}):
        before, after = planned[RECIPE].get(part), now[RECIPE].get(part)
        if before != after:
            what = "is new" if before is None else "is gone" if after is None else "has changed"
            yield f"{part} {what}"
    if planned[PROCS] != now[PROCS]:
        yield f"{now[PROCS]} processes instead of {planned[PROCS]}"
    for package in sorted({*planned[VERSIONS], *now[VERSIONS]}):
        before, after = planned[VERSIONS].get(package), now[VERSIONS].get(package)
        if before != after:
            yield f"{package} {after} instead of {before}"


def _parts(plan: Plan) -> dict[str, Any]:
    """The recipe's slots, and everything else that changes what it does."""
    public = plan.recipe.public()
    slots = {f"slot `{slot}`": value for slot, value in (public.get("stages") or {}).items()}
    return {**slots, "the seed": public.get("seed", 0)}


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

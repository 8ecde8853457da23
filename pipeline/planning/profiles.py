"""Profiles, made once and kept: on disk, under a key of all that they depend on."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.artifacts import ModelSource, Precision, TrainedRun
from pipeline.files import private_folder, replace_text
from pipeline.plan import Plan, Step
from pipeline.planning.planner import Results
from pipeline.planning.profile import Profile
from pipeline.planning.shapes import SampleShape
from pipeline.planning.topology import Topology
from pipeline.rundir import versions

FORMAT = 1
DECIDES = (ModelSource, Precision, TrainedRun)
"""Stages that give one of these decide what a model's parts take."""
CODE = ("pipeline", "stages")
"""Packages whose files, as they are, are part of a key: a change of any may change profiles."""
FOLDER = Path("~/.cache/pipetrain/profiles")

_made: dict[str, Profile] = {}


def profile_of(plan: Plan, planners: Mapping[str, Any], topology: Topology) -> Profile:
    """The profile of a recipe's model. Raises what planners raise, and UsageError where no slot
    tells of samples."""
    samples = samples_of(plan, planners, topology)
    key = _key(plan, planners, topology, samples)
    if key is not None and key in _made:
        return _made[key]
    found = None if key is None else _read(key)
    if found is None:
        from pipeline.planning.trace.profiling import profile
        from pipeline.planning.trace.run import Job

        found = profile(Job(plan=plan, planners=planners, topology=topology, samples=samples))
        if key is not None:
            _write(key, found)
    if key is not None:
        _made[key] = found
    return found


def samples_of(plan: Plan, planners: Mapping[str, Any], topology: Topology) -> SampleShape:
    """What the data slot tells of its samples. Raises UsageError where none does."""
    told = Results()
    for step in plan.steps:
        planner = planners.get(step.slot)
        if hasattr(planner, "forecast") and not [*told.missing(planner, "forecast")]:
            told[step.slot] = told.call(planner, "forecast", topology)
    return told.require(
        SampleShape, "nothing can be planned: no slot of the recipe tells the length of its samples"
    )


def _key(
    plan: Plan, planners: Mapping[str, Any], topology: Topology, samples: SampleShape
) -> str | None:
    """A digest; None where it cannot be told what a stage depends on."""
    stages = _stages(plan, planners, DECIDES)
    if stages is None:
        return None
    content = {
        "format": FORMAT,
        "versions": versions(),
        "code": _code(),
        "samples": dataclasses.asdict(samples),
        "device": topology.device,
        "stages": stages,
    }
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _stages(
    plan: Plan, planners: Mapping[str, Any], kinds: tuple[type, ...]
) -> list[list[Any]] | None:
    """Stages that give one of these, and what of their settings matters; None where that cannot be
    told."""
    found = []
    for step in plan.steps:
        if issubclass(step.gives or object, kinds):
            settings = _settings(step, planners.get(step.slot))
            if settings is None:
                return None
            found.append([step.use, settings])
    return found


def _settings(step: Step, planner: Any) -> Mapping[str, Any] | None:
    if hasattr(planner, "depends"):
        told: Mapping[str, Any] | None = planner.depends()
        return told
    return dataclasses.asdict(step.stage)


@functools.cache
def _code() -> str:
    found = [
        (str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns)
        for root in _folders()
        for path in sorted(root.rglob("*.py"))
    ]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def _folders() -> Iterator[Path]:
    for package in CODE:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            yield Path(spec.origin).parent


def _file(key: str) -> Path:
    given = os.environ.get("PIPE_PROFILES")
    return (Path(given) if given else FOLDER.expanduser()) / f"{key}.json"


def _read(key: str) -> Profile | None:
    """The profile that is kept; None for one that is not there, or cannot be read as one."""
    try:
        return Profile.restored(json.loads(_file(key).read_text("utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _write(key: str, profile: Profile) -> None:
    """Keep it, if there is a place to."""
    file = _file(key)
    try:
        private_folder(file.parent)
        replace_text(file, json.dumps(profile.record()) + "\n")
    except OSError:
        return

"""Profiles, made once and kept: on disk, under a key of all that they depend on."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from pipeline.artifacts import ModelSource, Precision, TrainedRun
from pipeline.files import private_folder, replace_text
from pipeline.planning.planner import Job
from pipeline.planning.profile import Profile
from pipeline.rundir import versions

DECIDE = (ModelSource, Precision, TrainedRun)
"""Stages that give one of these decide what a model's parts take."""
CODE = ("pipeline", "stages")
"""Packages whose files are part of a key: a change of any may change profiles."""
FOLDER = Path("~/.cache/pipetrain/profiles")

PROFILE = TypeAdapter(Profile)

_made: dict[str, Profile] = {}


def profile_of(job: Job) -> Profile:
    """The profile of a job's model. Raises StageError for a model that cannot be run without
    values."""
    key = _key(job)
    found = _made.get(key) or _read(key)
    if found is None:
        from pipeline.planning.trace.profiling import profile

        found = profile(job)
        _write(key, found)
    _made[key] = found
    return found


def _key(job: Job) -> str:
    content = {
        "versions": versions(),
        "code": _code(),
        "samples": dataclasses.asdict(job.samples),
        "device": job.topology.device,
        "stages": [
            [step.use, _settings(step.stage, job.planners.get(step.slot))]
            for step in job.plan.steps
            if issubclass(step.gives or object, DECIDE)
        ],
    }
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _settings(stage: Any, planner: Any) -> Any:
    """The settings of a stage that a profile depends on: all, unless its planner says."""
    return planner.depends() if hasattr(planner, "depends") else dataclasses.asdict(stage)


@functools.cache
def _code() -> Sequence[Any]:
    """Sizes and times of the files that make profiles."""
    specs = [importlib.util.find_spec(package) for package in CODE]
    roots = [Path(str(spec.origin)).parent for spec in specs if spec is not None]
    files = [(path, path.stat()) for root in roots for path in sorted(root.rglob("*.py"))]
    return [(path.name, about.st_size, about.st_mtime_ns) for path, about in files]


def _file(key: str) -> Path:
    given = os.environ.get("PIPE_PROFILES")
    return (Path(given) if given else FOLDER.expanduser()) / f"{key}.json"


def _read(key: str) -> Profile | None:
    """The profile that is kept; None for one that is not there, or cannot be read as one."""
    try:
        return PROFILE.validate_json(_file(key).read_bytes())
    except (OSError, ValueError):
        return None


def _write(key: str, profile: Profile) -> None:
    """Keep it, if there is a place to."""
    file = _file(key)
    with contextlib.suppress(OSError):
        private_folder(file.parent)
        replace_text(file, PROFILE.dump_json(profile).decode() + "\n")

"""Profiles on disk, under a key of all that they depend on."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from pipeline.contracts.model import ModelSource
from pipeline.contracts.optimizer import Precision
from pipeline.contracts.training import TrainedRun
from pipeline.planning.planner import Job, Planner
from pipeline.planning.profile import Profile
from pipeline.utils.activities import activity
from pipeline.utils.files import cache_folder, private_folder, replace_text
from pipeline.utils.foreign import read_whole
from pipeline.utils.packages import versions

DECIDE = (ModelSource, Precision, TrainedRun)
"""Types whose stages a profile depends on."""
CODE = ("pipeline", "stages")
"""Packages whose files are part of a key."""
ADAPTER = TypeAdapter(Profile)

_made: dict[str, Profile] = {}


def profile_of(job: Job) -> Profile:
    """The profile of a job's model: of this process, from disk, or a new one. Raises StageError."""
    key = _key(job)
    given = os.environ.get("PIPE_PROFILES")
    file = (Path(given) if given else cache_folder() / "profiles") / f"{key}.json"
    if key not in _made:
        try:
            _made[key] = ADAPTER.validate_json(read_whole(file))
        except (OSError, ValueError):  # missing, or damaged
            from pipeline.planning.trace.profiling import profile

            with activity("running the model's layers without memory"):
                _made[key] = profile(job)
            with contextlib.suppress(OSError):  # a folder that cannot be written
                file.parent.parent.mkdir(parents=True, exist_ok=True)
                private_folder(file.parent)
                replace_text(file, ADAPTER.dump_json(_made[key]).decode() + "\n")
    return _made[key]


def _key(job: Job) -> str:
    content = {
        "versions": versions(),
        "code": _code(),
        "samples": dataclasses.asdict(job.samples),
        "device": job.topology.device,
        "division": job.division and job.division.key,
        "stages": [
            [planned.use, (job.planners.get(planned.slot) or Planner(planned.stage)).depends()]
            for planned in job.plan.slots
            if issubclass(planned.gives or object, DECIDE)
        ],
    }
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _code() -> Sequence[Any]:
    """Name, size and time of each of the project's files: a change of any may change profiles."""
    home = Path(__file__).parents[2]
    files = [path for package in CODE for path in sorted((home / package).rglob("*.py"))]
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]

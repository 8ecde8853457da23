"""A profile: what a model's parts take on one rank, measured once without memory, and kept.

A part is what runs between two marks: what comes before the first block, a block of each kind, the
head, the loss; each forward and backward. Bytes are functions of the samples of a micro-batch.
Profiles are kept on disk, under a key of all that they depend on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import operator
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from pipeline.contracts.model import ModelSource
from pipeline.contracts.precision import Precision
from pipeline.contracts.training import TrainedRun
from pipeline.planning.planner import Job, Planner
from pipeline.planning.shapes import ModelShape
from pipeline.planning.strategy import Event, Unit
from pipeline.utils.files import private_folder, replace_text
from pipeline.utils.versions import versions

DECIDE = (ModelSource, Precision, TrainedRun)
"""Stages that give one of these decide what a model's parts take."""
CODE = ("pipeline", "stages")
"""Packages whose files are part of a key: a change of any may change profiles."""
FOLDER = Path("~/.cache/pipetrain/profiles")

_made: dict[str, Profile] = {}


@dataclass(frozen=True)
class Line:
    """An amount that grows with the samples of a micro-batch: `each` more for each."""

    fixed: float
    each: float

    def at(self, samples: int) -> int:
        """The amount of so many samples."""
        return round(self.fixed + self.each * samples)


ZERO = Line(0, 0)


@dataclass(frozen=True)
class Peak:
    """A moment inside a part that may be its fullest. bytes: of activations and temporaries, beyond
    what was there when the part began. arrived: elements of its weights whose gradients have come,
    which a strategy may keep. newest: elements of the weight whose gradient comes then."""

    bytes: Line
    arrived: int = 0
    newest: int = 0


@dataclass(frozen=True, kw_only=True)
class Part:
    """Memory and work of a part of the model in one direction. kept, offloaded: bytes of the device
    and of the host that are there when it ends, beyond those when it began. peaks: moments that are
    the fullest for some number of samples, under some strategy. products, attention, again:
    floating-point operations of matrix products, of attention between tokens that see each other,
    and of both done a second time. made: bytes of all tensors that are made."""

    kept: Line = ZERO
    offloaded: Line = ZERO
    peaks: tuple[Peak, ...] = ()
    products: Line = ZERO
    attention: Line = ZERO
    again: Line = ZERO
    made: Line = ZERO


NOTHING = Part()


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model under a recipe's settings, at one length of samples. parts: event and unit of a
    strategy's moments -> what runs then, a block's kind standing for it. recomputed: which kinds of
    blocks run again in backward, and so use their weights twice."""

    model: ModelShape
    parts: Mapping[str, Part]
    recomputed: tuple[bool, ...]

    def part(self, event: Event, unit: Unit) -> Part:
        """The part that runs at a moment, which may be nothing."""
        where = self.model.blocks[unit] if isinstance(unit, int) else unit
        return self.parts.get(f"{event} {where}", NOTHING)

    def total(self, field: str, event: str = "") -> Line:
        """An amount of a whole micro-batch, or of all units at an event."""
        times = Counter(map(str, self.model.blocks))
        fixed = each = 0.0
        for name, part in self.parts.items():
            when, unit = name.split()
            line, count = getattr(part, field), times.get(unit, 1) * (event in ("", when))
            fixed, each = fixed + line.fixed * count, each + line.each * count
        return Line(fixed, each)


ADAPTER = TypeAdapter(Profile)


def fullest(peaks: Iterable[Peak]) -> tuple[Peak, ...]:
    """The peaks of which no other one is at least as full for every number of samples from one on
    and at any bytes that a strategy keeps for an element."""
    found: dict[Peak, tuple[float, ...]] = {}
    for peak in sorted(peaks, key=_sizes, reverse=True):
        sizes = _sizes(peak)
        if not any(all(map(operator.ge, other, sizes)) for other in found.values()):
            found[peak] = sizes
    return tuple(found)


def _sizes(peak: Peak) -> tuple[float, ...]:
    line = peak.bytes
    return line.each, line.fixed + line.each, peak.arrived, peak.newest


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
            [step.use, (job.planners.get(step.slot) or Planner(step.stage)).depends()]
            for step in job.plan.steps
            if issubclass(step.gives or object, DECIDE)
        ],
    }
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


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
        return ADAPTER.validate_json(_file(key).read_bytes())
    except (OSError, ValueError):
        return None


def _write(key: str, profile: Profile) -> None:
    """Keep it, if there is a place to."""
    file = _file(key)
    with contextlib.suppress(OSError):
        private_folder(file.parent)
        replace_text(file, ADAPTER.dump_json(profile).decode() + "\n")

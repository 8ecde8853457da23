"""A stage, the optional methods that it may have, and what it is given.

A stage is a frozen, keyword-only dataclass with a docstring. Its fields are its whole
configuration; each field is documented by the string under it and bounded through
`typing.Annotated` with pydantic's constraints. `run(self, ctx, ...)` is annotated with the
artifacts it needs and the one it returns. Importing a stage's module imports no torch.

Optional methods are the protocols below; a stage has one by defining it, and the registry checks
its signature when the stage is loaded. The class attribute `for_export`, also optional, maps fields
to the values that `pipe export` sets, as it trains nothing and runs on the CPU.

`pipe plan`, `pipe advise` and `pipe bench` ask a separate class, the stage's planner
(`pipeline.planning`), which no run imports."""

from __future__ import annotations

import logging
import shutil
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pipeline.contracts.metrics import Metrics
from pipeline.distributed.process_group import DistContext
from pipeline.errors import StageError
from pipeline.hardware.host import free_memory
from pipeline.utils.text import human

if TYPE_CHECKING:
    from pipeline.utils.hub import HubName

ENGINE_FILE, ENVIRONMENT_FILE = "engine.json", "environment.json"
"""Files of a run's folder: the first training's live engine; packages and machine of this start."""


def engine_file(training: str) -> str:
    """Name of the file of facts of the live engine of a training; empty for the first."""
    return f"engine-{training}.json" if training else ENGINE_FILE


class Durable(ABC):
    """An artifact that survives its process."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Everything that is needed to find the artifact again, as JSON for the journal."""

    @classmethod
    @abstractmethod
    def restore(cls, record: Mapping[str, Any]) -> Durable:
        """The artifact from its record, on a resume; raises StageError when it is gone."""


class Stage(Protocol):
    """Structural type of every stage; nothing needs to inherit from it."""

    def run(self, ctx: Context, *artifacts: Any) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class ResourceNeed:
    """Disk space and host memory that a stage will need on this machine."""

    what: str
    """Purpose, as in `needs 3.2 GB for ...`."""
    disk: int = 0
    """Bytes in `folder`, beyond what is there already."""
    folder: Path | None = None
    """Need not exist yet."""
    memory: int = 0
    """Bytes of host memory on rank 0's machine, at one time."""
    kept: bool = False
    """Whether the memory is allocated from now on, in addition to all other needs."""


@runtime_checkable
class NeedsResources(Protocol):
    """A stage that needs disk or host memory beyond what its artifacts have taken."""

    def resource_needs(self, ctx: Context, *artifacts: Any) -> Iterable[ResourceNeed]:
        """Yield each need. Called on rank 0 only, before training, as soon as the annotated
        artifacts are there. A parameter with the name of one of `run` gets the same."""


@runtime_checkable
class RunsDry(Protocol):
    """A stage that takes part in a recipe's dry run."""

    def run_dry(self, ctx: Context, *artifacts: Any) -> Any:
        """Do the work of `run`, before training, and leave nothing on disk. `ctx.run_dir` is
        removed afterwards; remove anything elsewhere through `ctx.on_exit`."""


@runtime_checkable
class VerifiesResult(Protocol):
    """A stage that can check whether its durable result is unchanged."""

    def verify_result(self, result: Any) -> None:
        """Raise StageError if it has changed; called in one process, before a resume skips it."""


@runtime_checkable
class DividesRanks(Protocol):
    """A stage under which several ranks run one model together."""

    def data_ranks(self, procs: int) -> int:
        """Number of shares of a step's samples on `procs` processes; 0 if these do not divide."""


@runtime_checkable
class NamesHub(Protocol):
    """A stage that reads models or data sets of the Hugging Face hub."""

    def hub_names(self) -> Iterable[HubName]:
        """Yield each that its fields name. A run replaces a branch, a tag or none by the commit,
        before anything else is asked of the stage."""


TAKES_ARTIFACTS = ("resource_needs", "run_dry")
"""Optional methods that take a context and artifacts by annotation, as `run` does."""
TAKES_ONE = ("check", "data_ranks", "verify_result")
"""Optional methods that take one argument."""
TAKES_NONE = ("hub_names", "update_rules")
"""Optional methods that take no argument."""


@dataclass(kw_only=True)
class Context:
    """Surroundings of a running stage, on every rank."""

    run_dir: Path
    """The run's folder; the same on every rank."""
    seed: int
    dist: DistContext
    log: logging.Logger
    """Shown on screen from rank 0; every rank's goes to `logs/rank-N.log`."""
    metrics: Metrics
    """`metrics.jsonl`; writes from rank 0 only, calls from other ranks do nothing."""
    on_exit: Callable[[Callable[[], object]], object] = field(default=lambda call: None)
    """Register a call for the end of the run, last in first out, also after a failure."""
    accept: frozenset[str] = frozenset()
    """Changes that `pipe resume --accept` allows: parts of `Progress.lineage`, or `precision`."""
    spec: str = ""
    """On rank 0 the run, for processes that follow it: JSON text of `RunSpec`."""
    slot: str = ""
    """Name of the slot that is running."""
    training: str = ""
    """Slot that trains with what this slot returns, or that trained before it; empty for the
    recipe's first training. Files of a training have it in their names."""

    @property
    def engine_file(self) -> Path:
        """File of facts of the live engine of this training."""
        return self.run_dir / engine_file(self.training)


def require_resources(needs: Iterable[ResourceNeed]) -> None:
    """Raise StageError naming every file system that is too small, and host memory, with what needs
    it. Needs on one file system add up, and memory that is kept; of other memory the largest need
    counts."""
    needs, problems = list(needs), []
    devices: dict[int, list[tuple[Path, ResourceNeed]]] = defaultdict(list)
    free_bytes: dict[int, int] = {}
    for need in needs:
        if need.folder is not None and need.disk:
            # the folder, or the nearest above it that exists
            there = next(one for one in (need.folder, *need.folder.parents) if one.exists())
            devices[there.stat().st_dev].append((need.folder, need))
            free_bytes[there.stat().st_dev] = shutil.disk_usage(there).free
    for device, here in devices.items():
        free = free_bytes[device]
        if sum(need.disk for _, need in here) > free:
            parts = ", ".join(f"{human(need.disk)} for {need.what}" for _, need in here)
            problems.append(
                f"not enough disk space in {here[0][0]}: {parts}, {human(free)} available"
            )
    free = free_memory()
    for need in sorted(needs, key=lambda need: not need.kept):
        if need.memory > free:
            parts = f"{human(need.memory)} for {need.what}"
            problems.append(f"not enough host memory: {parts}, {human(free)} available")
        elif need.kept:
            free -= need.memory
    if problems:
        raise StageError("; ".join(problems), hint="make room, or write elsewhere")

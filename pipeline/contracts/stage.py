"""What a stage is, and what it is given when it runs.

A stage is a frozen, keyword-only dataclass with a docstring. Its fields are its whole
configuration; each field is documented by the string under it and bounded through
`typing.Annotated` with pydantic's constraints. `run(self, ctx, ...)` is annotated with the
artifacts it needs and the one it gives. An optional `check(self, plan)` yields problems that only
show in the company of other slots or of the machine; it never raises and imports nothing heavy.
Importing a stage's module imports no torch.

Two more methods are optional. Both take artifacts as `run` does, by their annotations, and are
called before training starts. `resource_needs(self, ctx, ...)` yields each `ResourceNeed` of the
stage; it is called on rank 0 alone, as soon as the artifacts that it takes are there.
`run_dry(self, ctx, ...)` does what `run` does, for a recipe that asks for a dry run: in
`ctx.run_dir`, which is another than the run's and is removed afterwards, and with nothing left
anywhere else (`ctx.on_exit`).

`verify_result(self, result)`, also optional, raises StageError where a durable result of the stage
is not as it was left. A resume asks it, in one process, before the slot counts as done.

`for_benchmark(self, trial)`, for `pipe bench`, gives the same stage for a few measured steps; the
stage that trains needs it, others where they would leave something outside of the run's folder or
do what no step needs.

`for_export`, an optional class attribute, maps fields to the values that `pipe export` gives them
where a recipe sets them, as it trains nothing and runs on the CPU.

For `pipe plan` and `pipe advise` a stage has a planner (`pipeline.planning.planner`), a class of
its own, so that no run imports it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pipeline.errors import Problem, UsageError

if TYPE_CHECKING:
    from pipeline.distributed.process_group import DistContext
    from pipeline.run.metrics import Metrics

T = TypeVar("T")


class Durable(ABC):
    """An artifact that survives its process: the journal keeps `record()`, resume calls
    `restore()`."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Everything that is needed to find the artifact again, as JSON."""

    @classmethod
    @abstractmethod
    def restore(cls, record: Mapping[str, Any]) -> Durable:
        """The artifact from its record; raises StageError when it is gone."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A way to use a stage that wraps."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of the slot."""
    what: str = ""
    """What it does, as in `every rank holds everything`."""
    order: int = 0
    """When `pipe advise` tries it (`pipeline.planning.planner.Tier`); 0: never."""
    at_first: Mapping[str, Any] = field(default_factory=dict)
    """Further fields that `pipe advise` begins with; its planner's `savings` take them back."""


Presets = Mapping[str, Preset]
"""By name."""


class Stage(Protocol):
    """Structural type of every stage; nothing needs to inherit from it."""

    def run(self, ctx: Context, *artifacts: Any) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class PlanView:
    """What a stage's `check` may look at: the whole recipe, validated, and how it will be
    launched."""

    name: str
    seed: int
    procs: int
    """Processes over all nodes."""
    device: str
    """`cpu` or `cuda`, as asked; `auto` is already decided."""
    slots: Mapping[str, Any]
    """Slot name -> stage instance, in order. Slots with mistakes of their own are missing."""
    forecast: bool = False
    """Whether it is asked what the recipe would need, and nothing is to run: files that only a run
    reads may still be missing."""

    def find(self, kind: type[T]) -> T | None:
        """The first slot's stage that is an instance of `kind`."""
        return next((stage for stage in self.slots.values() if isinstance(stage, kind)), None)

    def giving(self, artifact: type) -> Iterator[Any]:
        """Stages whose `run` gives `artifact` or a subclass of it."""
        from pipeline.contracts.signature import gives

        for stage in self.slots.values():
            given = gives(type(stage))
            if given is not None and issubclass(given, artifact):
                yield stage

    def before(self, stage: Any, artifact: type) -> str | None:
        """The first slot before that of `stage` which gives `artifact` or a subclass of it; None
        without one, and when the stage is in no slot."""
        givers = {id(giver) for giver in self.giving(artifact)}
        found = None
        for slot, other in self.slots.items():
            if other is stage:
                return found
            if found is None and id(other) in givers:
                found = slot
        return None


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A few steps of a recipe, to be measured: no evaluation, and one checkpoint, at the end."""

    steps: int
    """Optimizer steps in all."""
    profile: tuple[int, ...] = ()
    """Those of them that torch.profiler is to record."""
    growth: Fraction = Fraction(1)
    """Samples of one optimizer step, in multiples of the recipe's."""
    procs: int = 1
    """What the recipe leaves to follow from the number of processes, such as a micro-batch, is to
    be what follows from this many: trials that are compared have it alike."""

    def grown(self, samples: int) -> int:
        """Samples of one optimizer step of the trial, from those of the recipe. Raises UsageError
        where they are no whole number."""
        grown = samples * self.growth
        if grown.denominator != 1:
            raise UsageError(
                f"samples per process cannot stay: {samples} samples a step x {self.growth} would "
                f"be {float(grown):g}",
                hint="--weak needs a global batch that divides evenly",
            )
        return int(grown)


@dataclass(frozen=True, kw_only=True)
class ResourceNeed:
    """What a stage will need of this machine."""

    what: str
    """What for, as in `needs 3.2 GB for ...`."""
    disk: int = 0
    """Bytes in `folder`, beyond what is there already."""
    folder: Path | None = None
    """Need not exist yet."""
    memory: int = 0
    """Bytes of host memory on rank 0's machine, at one time."""


class Checked(Protocol):
    """A stage with an opinion on the rest of the recipe."""

    def check(self, plan: PlanView) -> Iterator[Problem]: ...


@dataclass(kw_only=True)
class Context:
    """What every stage is given when it runs, on every rank."""

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
    """Changes that `pipe resume --accept` declared to be intended: parts of `Progress.lineage`, or
    `precision`."""
    slot: str = ""
    """Name of the slot that is running."""

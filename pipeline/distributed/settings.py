"""The `launch` block of a recipe: processes, nodes, restarts and time limits of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Unit
from pydantic import AfterValidator, BeforeValidator, Field

from pipeline.errors import RunFailed

Device = Annotated[
    Literal["auto", "cpu", "cuda", "gpu"],
    AfterValidator(lambda device: "cuda" if device == "gpu" else device),
]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600), Unit("s")]


FIXED = (
    "nodes that `pipe` starts are a fixed number; Ray Train (engine: ray, workers: {min: 2, max: "
    "4}) and torchrun (--nnodes 2:4) continue with fewer and take back those that return"
)


def _fixed(value: Any) -> Any:
    """The value, unless it is a range. Raises ValueError."""
    if isinstance(value, Mapping) or (isinstance(value, str) and ":" in value):
        raise ValueError(FIXED)
    return value


Count = Annotated[int, Field(ge=1, le=65_536)]


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Bounds of the number of workers of an elastic run."""

    min: Count
    """Workers without which the run does not continue."""
    max: Count
    """Workers that the run has where the cluster has room for them."""
    look_every: Seconds = 60.0
    """Time between two looks at whether the cluster has room for another number."""

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ValueError(f"min is {self.min}, but max is {self.max}")


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """Automatic restarts after a failure, each from the newest checkpoint.

    A rank that was killed, that stalled, or whose node was lost is restarted. One that raised an
    error is restarted only if this start had saved a checkpoint or finished a durable slot:
    otherwise the same would happen again. An error that a person has to act on (a full disk, broken
    data, a loss that is not a number) ends the run."""

    limit: Annotated[int, Field(ge=0)] = 3
    """Restarts in a row without a new checkpoint or a finished stage; 0 never restarts."""
    backoff: Annotated[float, Field(ge=0, le=3600), Unit("s")] = 5.0
    """Seconds before the first restart; twice as many before each further one in a row."""
    max_backoff: Annotated[float, Field(ge=0, le=24 * 3600), Unit("s")] = 300.0
    """Most seconds before a restart."""


@dataclass(eq=False)
class Attempts:
    """Counts the starts of a run without progress."""

    settings: Restarts
    number: int = field(default=0, init=False)
    """Restarts in a row without progress."""

    def wait_after(self, error: RunFailed, *, progressed: bool) -> float | None:
        """Seconds to wait before the next start; None to give up. `progressed` says whether the
        failed start has brought anything to an end that the next need not repeat."""
        wanted = error.restart == "always" or (error.restart == "after progress" and progressed)
        if progressed:
            self.number = 0
        settings = self.settings
        if not wanted or self.number >= settings.limit:
            return None
        self.number += 1
        return float(min(settings.backoff * 2.0 ** min(self.number - 1, 60), settings.max_backoff))


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds without a sign of life after which a rank counts as stalled. Then the stacks of all
    ranks are kept in the run's folder, and the run is restarted."""

    rendezvous: Seconds = 600.0
    """Time for all processes and nodes to meet."""
    node: Annotated[float, Field(ge=3, le=7 * 24 * 3600), Unit("s")] = 10.0
    """Time without a sign of life of a node, about two a second, after which it counts as lost;
    give a loaded machine or network more. Node 0's value holds for all."""
    collectives: Seconds = 1800.0
    """Time of one collective operation, after which torch ends the process."""
    step: Seconds = 1800.0
    """Time of one micro-batch, in a step or an evaluation."""
    save: Seconds = 1800.0
    """Time in which a checkpoint is handed over to the process that writes it, or is written where
    training waits for that."""
    load: Seconds = 3600.0
    """Time of one sign of life to the next in all else: loading, tokenising, exporting."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Processes and devices of a run."""

    procs: Count | None = None
    """Processes on each node; null is one per GPU, or one on the CPU."""
    nodes: Annotated[Count | None, BeforeValidator(_fixed)] = None
    """Nodes; null is as many as the launcher has, or one."""
    engine: Literal["ray"] | None = None
    """Engine that starts the ranks, over all nodes of its cluster: ray is Ray Train; null leaves it
    to `pipe`, or to the launcher that has started it."""
    workers: Count | Workers | None = None
    """Ranks under an engine, or `{min, max}` for as many as its cluster has room for; null is
    `procs` times `nodes`."""
    resources_per_worker: Mapping[str, Annotated[float, Field(ge=0)]] | None = None
    """What an engine reserves for each rank, by its names; null is one GPU or one core. With
    `GPU: 1` device auto is cuda."""
    max_failures: Annotated[int, Field(ge=0)] = 3
    """Restarts by an engine after failures; preemptions do not count. Without an engine, see
    `restarts`."""
    device: Device = "auto"
    """Device to compute on; auto is cuda if there is a GPU, and gpu is another name of cuda."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads of each process; null shares the cores out evenly."""
    restarts: Restarts = Restarts()
    """Automatic restarts after a failure."""
    timeouts: Timeouts = Timeouts()
    """Time limits, after which a run counts as stalled."""

    def __post_init__(self) -> None:
        if self.engine is None and (self.workers or self.resources_per_worker):
            raise ValueError("workers and resources_per_worker are an engine's (engine: ray)")
        if self.engine and self.workers and (self.procs or self.nodes):
            raise ValueError(
                "workers says how many ranks an engine starts; leave out procs and nodes"
            )

    @property
    def ranks(self) -> int | None:
        """Processes that the run has at most; None if the recipe does not say."""
        if self.workers is not None:
            return self.workers.max if isinstance(self.workers, Workers) else self.workers
        return None if self.procs is None else self.procs * (self.nodes or 1)

    @property
    def fewest(self) -> int | None:
        """Processes without which the run does not continue; None if the recipe does not say."""
        return self.workers.min if isinstance(self.workers, Workers) else self.ranks


@dataclass(frozen=True, kw_only=True)
class ProcessCounts:
    """Processes that a launcher has started, or is about to start, as far as that is known."""

    procs: int | None = None
    """Over all nodes."""
    per_node: int | None = None
    """On each node."""
    nodes: int | None = None
    """Nodes."""

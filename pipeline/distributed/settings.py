"""The `launch` block of a recipe: processes, nodes, restarts and time limits of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Unit
from pydantic import AfterValidator, Field

from pipeline.errors import RunFailed

Device = Annotated[
    Literal["auto", "cpu", "cuda", "gpu"],
    AfterValidator(lambda device: "cuda" if device == "gpu" else device),
]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600), Unit("s")]


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Bounds of the number of nodes of an elastic run."""

    min: Annotated[int, Field(ge=1, le=65_536)] = 1
    """Nodes without which the run does not continue."""
    max: Annotated[int, Field(ge=1, le=65_536)]
    """Nodes that the run starts with, if all come in time, and returns to when lost ones come
    back."""

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
    """Time without a message of a node, about one a second, after which it counts as lost; give a
    loaded machine or network more. Node 0 needs none to itself, and its value holds for all."""
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

    procs: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Processes on each node; null is one per GPU, or one on the CPU."""
    nodes: Annotated[int, Field(ge=1, le=65_536)] | Nodes | None = None
    """Nodes, or `{min, max}` for a run that continues with the nodes that are left; null is as many
    as the launcher has, or one."""
    device: Device = "auto"
    """Device to compute on; auto is cuda if there is a GPU, and gpu is another name of cuda."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads of each process; null shares the cores out evenly."""
    restarts: Restarts = Restarts()
    """Automatic restarts after a failure."""
    timeouts: Timeouts = Timeouts()
    """Time limits, after which a run counts as stalled."""

    @property
    def ranks(self) -> int | None:
        """Processes that the run starts with; None if the recipe does not say."""
        return None if self.procs is None else self.procs * (self.most_nodes or 1)

    @property
    def most_nodes(self) -> int | None:
        """Nodes that the run starts with; None if the recipe does not say."""
        return self.nodes.max if isinstance(self.nodes, Nodes) else self.nodes

    @property
    def fewest_nodes(self) -> int | None:
        """Nodes without which the run does not continue; None if the recipe does not say."""
        return self.nodes.min if isinstance(self.nodes, Nodes) else self.nodes


@dataclass(frozen=True, kw_only=True)
class ProcessCounts:
    """Processes that a launcher has started, or is about to start, as far as that is known."""

    procs: int | None = None
    """Over all nodes."""
    per_node: int | None = None
    """On each node."""
    nodes: int | None = None
    """Nodes; the most of an elastic run."""

"""Messages between the agents of a run's nodes and its coordinator, as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.errors import Memory, Restart

MOST_TEXT = 8000
"""Characters of a failure that are sent."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The end of a node's part in a round."""

    kind: Literal["finished", "stopped", "raised", "stalled", "died", "lost"]
    text: str = ""
    """The failure, or the signal that asked for the stop, for people."""
    restart: Restart = "never"
    """When another start may succeed, as in RunFailed."""
    memory: Memory = ""
    """Kind of memory that ran out."""
    time: float = 0.0
    """Time of the failure, in seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """An agent's sign of life, and its state."""

    agent: str
    """Identity of this start of the agent."""
    run: str
    """Name of the run, and of the scheduler's job if there is one."""
    node: int
    """Node rank."""
    host: str
    """Name of the machine."""
    procs: int
    """Ranks of each node."""
    port: int
    """A free port, for the ranks' store should rank 0 be here."""
    round: int = 0
    """Round in which it takes part or whose end it reports; 0 if it waits for one."""
    report: Report | None = None
    stopping: str = ""
    """The signal that asked this node to stop; empty if none has."""
    landmarks: int = 0
    """Checkpoints and durable results of this round, as far as this node's ranks count them."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A node's place in a round."""

    first_rank: int
    world_size: int
    nodes: int
    master: str
    """Address of rank 0's machine."""
    port: int
    """Port of the store there."""


@dataclass(frozen=True, kw_only=True)
class Over:
    """The end of a run."""

    kind: Literal["finished", "stopped", "failed", "refused"]
    text: str = ""
    """The failure, or what asked for the stop, for people."""
    memory: Memory = ""
    """Kind of memory that ran out."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The coordinator's answer to a beat."""

    round: int
    """The round that runs, or ended last."""
    spec: str = ""
    """The run (`RunSpec.dump`), for a node that is not in the round yet."""
    place: Place | None = None
    """The node's place in the round; None if it has none, so that its ranks must not run."""
    stop: bool = False
    """Whether its ranks are to save and end."""
    over: Over | None = None
    lost_seconds: float = 0.0
    """Seconds without a message after which a node counts as lost, as node 0's recipe says."""

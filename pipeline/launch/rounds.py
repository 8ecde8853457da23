"""The decisions of a run of several nodes: when a round of its ranks begins and ends, and whether
another follows.

Each node writes its state twice a second, and node 0, which decides, its orders. A round is
one start of the ranks of all nodes; a failure ends it on all of them, and the next begins when all
are there. Nothing here touches the network or the clock."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from pipeline.distributed.settings import Attempts, Timeouts
from pipeline.errors import Memory, Restart, RunFailed
from pipeline.execution.failures import ON_EVERY_NODE

SUSPENDED_SECONDS = 5.0
"""Seconds without a look at the clock after which this process must have been suspended."""
GATHER_SECONDS = 2.0
"""Seconds to wait for further ends after the first failure, and for a state of nodes that have
written none since: a lost peer makes others fail first."""
FAILURE_PRIORITY = ("raised", "stalled", "died", "lost")
"""Kinds of failures: of several in a round, the last of these is the cause."""


@dataclass(frozen=True, kw_only=True)
class End:
    """The end of a node's part in a round, or of the run."""

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
class State:
    """A node's state, which it writes."""

    agent: str
    """Identity of this start of its process."""
    host: str
    """Name of the machine."""
    procs: int
    """Its ranks."""
    address: str = ""
    """Its address on the way to node 0."""
    session: str = ""
    """Of the newest orders that it has read, which none has who only repeats old states."""
    number: int = 0
    """Counts what this process has written, so that nothing counts twice."""
    round: int = 0
    """Round in which it takes part, or whose end it reports; 0 if it waits for one."""
    end: End | None = None
    landmarks: int = 0
    """Checkpoints and durable results of this round, as far as this node's ranks count them."""
    knows: bool = False
    """Whether it knows how the run has ended."""

    @classmethod
    def of(cls, procs: int) -> State:
        """The state of a start of this process, which has done nothing."""
        return cls(agent=secrets.token_hex(8), host=socket.gethostname(), procs=procs)


@dataclass(frozen=True, kw_only=True)
class Orders:
    """Node 0's orders for all nodes."""

    session: str
    """Identity of this start of node 0's process."""
    number: int = 0
    """Counts the orders."""
    round: int = 0
    """The round that runs, or ended last."""
    runs: bool = False
    """Whether ranks of this round are to run."""
    stop: bool = False
    """Whether they are to save and end, as the ranks of a node have."""
    over: End | None = None
    """How the run has ended."""
    failure: str = ""
    """What has ended the round, where another follows."""
    restart: int = 0
    """Number of that restart in a row."""
    wait: float = 0.0
    """Seconds until then."""
    lost_seconds: float = Timeouts().node
    """Seconds without a new state after which a node counts as lost, as node 0's recipe says."""

    def is_after(self, other: Orders) -> bool:
        """Whether these are newer than the `other` orders, or of another session."""
        return self.session != other.session or self.number > other.number

    def is_round_of(self, other: Orders | None) -> bool:
        """Whether ranks are to run in the round that began with the `other` orders."""
        begun = other and (other.session, other.round)
        return self.runs and (self.session, self.round) == begun


class Greeting(NamedTuple):
    """Node 0's answer to a process that is new to it."""

    agent: str
    session: str
    refusal: str = ""
    """Why it cannot take part; empty if it can."""


@dataclass(kw_only=True)
class _Node:
    """A node that has been greeted."""

    state: State
    seen: float
    rivals: dict[str, float] = field(default_factory=dict)
    """Other processes for the same node: when each was first seen."""


@dataclass(kw_only=True)
class Rounds:
    """Decides for all nodes: tell it their states by `greet` and `note`, and ask for `decide`."""

    nodes: int
    procs: int
    """Ranks of each node."""
    attempts: Attempts
    timeouts: Timeouts
    orders: Orders = field(init=False)
    _known: dict[int, _Node] = field(default_factory=dict, init=False)
    """By node rank."""
    _members: dict[int, str] = field(default_factory=dict, init=False)
    """Processes of the round, by node rank."""
    _failed_at: float | None = field(default=None, init=False)
    _not_before: float = field(default=0.0, init=False)
    _waits_since: float | None = field(default=None, init=False)
    _looked: float = field(default=float("inf"), init=False)

    def __post_init__(self) -> None:
        limit = self.timeouts.node
        self.orders = Orders(session=secrets.token_hex(8), lost_seconds=limit)

    def greet(self, node: int, state: State, now: float) -> Greeting | None:
        """Answer a process that was not greeted yet; None if it has to wait, since the one before
        it on this node may still be there, or if it has not read this session's orders."""
        known, session = self._known.get(node), self.orders.session
        if state.session != session:  # someone may repeat what was read in an earlier session
            return None
        if known is not None and known.state.agent != state.agent and not self._is_lost(node, now):
            since = known.rivals.setdefault(state.agent, now)
            if now - since < 2 * self.timeouts.node:
                return None
            text = f"node rank {node} is taken by {self._name(node)}: each node needs its own "
            return Greeting(state.agent, session, f"{text}(--node-rank)")
        if state.procs != self.procs:
            text = f"{state.host} has {state.procs} processes, but node 0 has {self.procs}: all "
            return Greeting(state.agent, session, f"{text}need the same number (launch.procs)")
        if known is None or known.state.agent != state.agent:
            new = replace(state, round=0, end=None, landmarks=0, knows=False)
            self._known[node] = _Node(state=new, seen=now)
        return Greeting(state.agent, session)

    def note(self, node: int, state: State, now: float) -> None:
        """Take note of a node's state, if it is new and of a process that was greeted."""
        known, source = self._known.get(node), (state.agent, state.session)
        if known is None or source != (known.state.agent, self.orders.session):
            return
        if state.number > known.state.number:
            known.state, known.seen = state, now

    def decide(self, now: float) -> Orders:
        """Decide what is due, and return what all are to do."""
        if now - self._looked > SUSPENDED_SECONDS:
            for node in self._known.values():
                node.seen = now
        self._looked = now
        if self.orders.over is None:
            self._look_at_round(now) if self.orders.runs else self._gather(now)
        self.orders = replace(self.orders, number=self.orders.number + 1)
        return self.orders

    def end(self, over: End) -> None:
        """End the run, unless it has ended."""
        if self.orders.over is None:
            self.orders = replace(self.orders, over=over, runs=False)

    def known_by_all(self, fewest: int = 0) -> bool:
        """Whether all nodes that are alive, and `fewest` at least without node 0, know that the run
        is over."""
        knows = {number for number, node in self._known.items() if number and node.state.knows}
        alive = {n for n in self._known if n and not self._is_lost(n, self._looked)}
        return len(knows) >= fewest and knows >= alive

    def _gather(self, now: float) -> None:
        """Begin a round when all nodes wait for one."""
        self._waits_since = now if self._waits_since is None else self._waits_since
        there = {
            number: node.state.agent
            for number, node in self._known.items()
            if node.state.round == 0 and not self._is_lost(number, now)
        }
        stopped = self._stopped()
        if stopped is not None:
            self.end(stopped)
        elif len(there) == self.nodes and now >= self._not_before:
            self.orders = replace(self.orders, round=self.orders.round + 1, runs=True)
            self._members, self._failed_at, self._waits_since = there, None, None
        elif len(there) < self.nodes and now - self._waits_since > self.timeouts.rendezvous:
            missing = (number for number in range(self.nodes) if number not in there)
            names = ", ".join(map(self._name, missing))
            text = f"not all of {self.nodes} nodes were there within "
            text += f"{self.timeouts.rendezvous:.0f} s: without {names}\n{ON_EVERY_NODE}"
            self.end(End(kind="lost", text=text))

    def _look_at_round(self, now: float) -> None:
        ends = {number: self._end(number, now) for number in self._members}
        given = [end for end in ends.values() if end is not None]
        failed = [end for end in given if end.kind in FAILURE_PRIORITY]
        self.orders = replace(self.orders, stop=self._stopped() is not None)
        if failed:
            self._failed_at = now if self._failed_at is None else self._failed_at
            since = self._failed_at + GATHER_SECONDS
            seen = {n: self._looked if n == 0 else self._known[n].seen for n in ends}
            if all(end or seen[number] >= since for number, end in ends.items()):
                self._decide(failed, now)
        elif len(given) == len(ends):
            self.end(self._stopped() or End(kind="finished"))

    def _end(self, number: int, now: float) -> End | None:
        """How a node's part in this round has ended; None while it continues."""
        state = self._known[number].state
        if self._is_lost(number, now) or state.agent != self._members[number]:
            limit = f"no sign of life for {self.timeouts.node:g} s"
            text = f"{self._name(number)} was lost: {limit}"
            return End(kind="lost", text=text, restart="always")
        return state.end if state.round == self.orders.round else None

    def _is_lost(self, number: int, now: float) -> bool:
        """Node 0 is not, whatever its load: who would notice is gone with it."""
        return number > 0 and now - self._known[number].seen >= self.timeouts.node

    def _stopped(self) -> End | None:
        """The stop that a node reports, with its name; rather one that has got the signal."""
        ends = {number: node.state.end for number, node in self._known.items()}
        stopped = [(n, end.text) for n, end in ends.items() if end and end.kind == "stopped"]
        number, cause = max(stopped, key=lambda one: bool(one[1]), default=(-1, ""))
        text = f"{cause} to {self._name(number)}" if cause else ""
        return End(kind="stopped", text=text) if stopped else None

    def _decide(self, failed: list[End], now: float) -> None:
        """Continue after a failure, or give up."""
        cause = max(failed, key=lambda end: (FAILURE_PRIORITY.index(end.kind), -end.time))
        stopped = self._stopped()
        # a stop has that consequence: ranks lost a peer which had nothing to save
        if stopped and all(one.kind == "raised" and one.restart != "never" for one in failed):
            self.end(stopped)
            return
        error = RunFailed(cause.text, restart=cause.restart)
        progressed = any(node.state.landmarks for node in self._known.values())
        wait = None if stopped else self.attempts.wait_after(error, progressed=progressed)
        if wait is None:
            self.end(cause)
            return
        self.orders = replace(
            self.orders, runs=False, failure=cause.text, restart=self.attempts.number, wait=wait
        )
        self._not_before = now + wait

    def _name(self, number: int) -> str:
        known = self._known.get(number)
        return f"node {number}" + (f" ({known.state.host}, {known.state.address})" if known else "")

"""The decisions of a run of several nodes: who takes part, when it ends, whether it continues.

Each node has an agent, which beats about once a second: it reports its state to the coordinator,
which answers what to do. The coordinator runs on node 0 and is the only one that decides, so nodes
cannot disagree. A round is one start of the ranks of all members; a failure ends it, and the next
begins with those that are there. Nothing here touches the network or the clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pipeline.distributed.settings import Attempts, Timeouts
from pipeline.errors import RunFailed
from pipeline.execution.failures import ON_EVERY_NODE
from pipeline.launch.messages import Beat, Over, Place, Reply, Report

LOST_SECONDS = Timeouts().node
"""Seconds without a beat after which a node counts as lost, unless the recipe has others."""
SUSPENDED_SECONDS = 5.0
"""Seconds without a look at the clock after which this process must have been suspended."""
FIRST_CALL_SECONDS = 60.0
"""Seconds that the first round waits for more nodes, when there are enough to begin."""
LAST_CALL_SECONDS = 5.0
"""The same for later rounds, whose nodes are there already unless they are lost."""
GATHER_SECONDS = 2.0
"""Seconds to wait for further reports after the first, and for a beat of the nodes that have sent
none: a lost peer makes others fail first."""
FAILURE_PRIORITY = ("raised", "stalled", "died", "lost")
"""Kinds of failures: of several in a round, the last of these is the cause."""


class Restarted(NamedTuple):
    """A failure after which the run continues."""

    text: str
    number: int
    """Number of the restart in a row."""
    seconds: float
    """Seconds until then."""


@dataclass(kw_only=True)
class _Node:
    """A node whose agent has beaten."""

    beat: Beat
    address: str
    seen: float


@dataclass(kw_only=True)
class Coordinator:
    """Decides for all nodes. Call `beat` for each message, and `tick` now and then."""

    fewest: int
    most: int
    attempts: Attempts
    rendezvous_seconds: float
    lost_seconds: float = LOST_SECONDS
    notes: list[Restarted] = field(default_factory=list)
    """Restarts that no one has recorded yet."""
    run: str = ""
    """Name of the run, and of the scheduler's job if there is one: two may have come by one
    port."""
    spec: str = ""
    own: str = field(default="", init=False)
    """The agent in this process, which cannot be lost: who would notice is gone with it."""
    over: Over | None = field(default=None, init=False)
    _nodes: dict[str, _Node] = field(default_factory=dict, init=False)
    """By the agents' identities."""
    _replaced: set[str] = field(default_factory=set, init=False)
    """Agents whose node has another one by now."""
    _told: set[str] = field(default_factory=set, init=False)
    """Agents that know that the run is over."""
    round: int = field(default=0, init=False)
    """The round that runs, or ended last."""
    _members: list[str] = field(default_factory=list, init=False)
    """Agents of the running round, in the order of their nodes; empty between rounds."""
    _stop: Literal["", "for good", "to regroup"] = field(default="", init=False)
    _failed_at: float | None = field(default=None, init=False)
    _not_before: float = field(default=0.0, init=False)
    _enough_since: float | None = field(default=None, init=False)
    _waits_since: float | None = field(default=None, init=False)
    _ticked: float = field(default=float("inf"), init=False)

    def beat(self, beat: Beat, address: str, now: float) -> Reply:
        """Take note of an agent's state, which came from `address`, and return what it is to do."""
        problem = self._refusal(beat, address)
        if problem:
            return Reply(round=self.round, over=Over(kind="refused", text=problem))
        self._nodes[beat.agent] = _Node(beat=beat, address=address, seen=now)
        self.tick(now)
        if self.over is not None:
            self._told.add(beat.agent)
        return Reply(
            round=self.round,
            spec=self.spec if beat.round != self.round else "",
            place=self._place(beat.agent),
            stop=bool(self._stop) and beat.agent in self._members,
            over=self.over,
            lost_seconds=self.lost_seconds,
        )

    def tick(self, now: float) -> None:
        """Decide what is due."""
        if now - self._ticked > SUSPENDED_SECONDS:
            for node in self._nodes.values():
                node.seen = now
        self._ticked = now
        if self.over is not None:
            return
        if self._members:
            self._look_at_round(now)
        else:
            self._gather(now)

    def end(self, over: Over) -> None:
        """End the run, unless it has ended."""
        self.over = self.over or over

    def known_by_all(self, fewest: int = 0) -> bool:
        """Whether all agents that are alive, and `fewest` at least, know that the run is over."""
        return len(self._told) >= fewest and self._told >= set(self._alive())

    def _refusal(self, beat: Beat, address: str) -> str:
        """Why this agent cannot take part; empty if it can. An agent that was started again on its
        node, or on another machine when that was lost, takes the place of the one before."""
        if beat.run != self.run:
            return f"node 0 runs {self.run} there, and this node {beat.run}"
        if not 0 <= beat.node < self.most:
            return f"node rank {beat.node} is none of {self.most} nodes, which count from 0"
        if beat.agent in self._replaced:
            return (
                f"another process was started for node rank {beat.node}: each node needs its own "
                "(--node-rank)"
            )
        if beat.agent in self._nodes:
            return ""
        alive = {agent: self._nodes[agent] for agent in self._alive()}
        others = [agent for agent, node in self._nodes.items() if node.beat.node == beat.node]
        for node in (alive[agent] for agent in others if agent in alive):
            if node.address != address:
                return f"node rank {beat.node} is taken by {node.beat.host} ({node.address})"
        procs = {node.beat.procs for agent, node in alive.items() if agent not in others}
        different = procs - {beat.procs}
        if different:
            return (
                f"{beat.host} has {beat.procs} processes, but the other nodes have "
                f"{different.pop()}: all need the same number (launch.procs)"
            )
        for agent in others:
            self._replaced.add(agent)
            self._nodes[agent].seen = float("-inf")
        return ""

    def _alive(self) -> list[str]:
        """Agents that beat, in the order of their nodes."""
        alive = [agent for agent in self._nodes if not self._is_lost(agent, self._ticked)]
        return sorted(alive, key=lambda agent: self._nodes[agent].beat.node)

    def _gather(self, now: float) -> None:
        """Begin a round when all nodes are there, or enough and the others had their time."""
        if any(node.beat.stopping for node in self._nodes.values()):
            self._end_by_stop()
            return
        alive = [n for n in self._alive() if self._nodes[n].beat.round == 0]
        if self._waits_since is None:
            self._waits_since = now
        enough = len(alive) >= self.fewest
        self._enough_since = (self._enough_since or now) if enough else None
        call = LAST_CALL_SECONDS if self.round else FIRST_CALL_SECONDS
        complete = len(alive) == self.most
        if self._enough_since is not None and now >= self._not_before:
            if complete or now - self._enough_since >= call:
                self._members = alive
                self.round += 1
                self._stop, self._failed_at = "", None
                self._enough_since = self._waits_since = None
                self._nodes = {agent: self._nodes[agent] for agent in self._alive()}
        elif not enough and now - self._waits_since > self.rendezvous_seconds:
            there = ", ".join(map(self._name, alive)) or "none"
            text = f"{len(alive)} of at least {self.fewest} nodes were there within "
            text += f"{self.rendezvous_seconds:.0f} s: {there}\n{ON_EVERY_NODE}"
            self.over = Over(kind="failed", text=text)

    def _look_at_round(self, now: float) -> None:
        reports = {n: self._report(n, now) for n in self._members}
        given = [report for report in reports.values() if report is not None]
        kinds = {report.kind for report in given}
        others = set(self._alive()) - set(self._members)
        if any(self._nodes[n].beat.stopping for n in self._members) or "stopped" in kinds:
            self._stop = self._stop or "for good"
        if kinds & set(FAILURE_PRIORITY):
            self._failed_at = now if self._failed_at is None else self._failed_at
            since = self._failed_at + GATHER_SECONDS
            seen = {n: self._ticked if n == self.own else self._nodes[n].seen for n in reports}
            if all(report or seen[n] >= since for n, report in reports.items()):
                self._decide(given, now)
        elif len(given) == len(reports):
            if set(kinds) == {"finished"}:
                self.over = Over(kind="finished")
            elif self._stop == "to regroup":
                self._members, self._not_before = [], now
            else:
                self._end_by_stop()
        elif not self._stop and others and len(self._members) < self.most:
            self._stop = "to regroup"

    def _report(self, agent: str, now: float) -> Report | None:
        """How a member's part in this round has ended; None while it continues."""
        node = self._nodes[agent]
        if self._is_lost(agent, now):
            text = f"{self._name(agent)} was lost: no sign of life for {self.lost_seconds:g} s"
            return Report(kind="lost", text=text, restart="always")
        return node.beat.report if node.beat.round == self.round else None

    def _is_lost(self, agent: str, now: float) -> bool:
        return agent != self.own and now - self._nodes[agent].seen >= self.lost_seconds

    def _end_by_stop(self) -> None:
        """End the run with the signal and the node that got it, where that is known: a rank that
        got it does not say so."""
        text = ""
        for agent, node in reversed(self._nodes.items()):
            report = node.beat.report
            told = report.text if report is not None and report.kind == "stopped" else ""
            if cause := node.beat.stopping or told:
                text = f"{cause} to {self._name(agent)}"
        self.over = Over(kind="stopped", text=text)

    def _decide(self, reports: list[Report], now: float) -> None:
        """Continue after a failure, or give up."""
        failed = [report for report in reports if report.kind in FAILURE_PRIORITY]
        cause = max(failed, key=lambda report: (FAILURE_PRIORITY.index(report.kind), -report.time))
        # a stop has that consequence: ranks lost a peer which had nothing to save
        lost_peer = all(one.kind == "raised" and one.restart != "never" for one in failed)
        if self._stop and lost_peer:
            if self._stop == "for good":
                self._end_by_stop()
            else:
                self._members, self._not_before = [], now
            return
        wait = None
        if self._stop != "for good":
            progressed = any(self._nodes[n].beat.landmarks for n in self._members)
            error = RunFailed(cause.text, restart=cause.restart)
            wait = self.attempts.wait_after(error, progressed=progressed)
        if wait is None:
            self.over = Over(kind="failed", text=cause.text, memory=cause.memory)
            return
        self.notes.append(Restarted(cause.text, self.attempts.number, wait))
        self._members, self._not_before = [], now + wait

    def _place(self, agent: str) -> Place | None:
        if agent not in self._members:
            return None
        first = self._nodes[self._members[0]]
        procs, index = first.beat.procs, self._members.index(agent)
        return Place(
            first_rank=index * procs,
            world_size=len(self._members) * procs,
            nodes=len(self._members),
            master=first.address,
            port=first.beat.port,
        )

    def _name(self, agent: str) -> str:
        node = self._nodes[agent]
        return f"node {node.beat.node} ({node.beat.host}, {node.address})"

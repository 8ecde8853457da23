"""One node of a run of several: it runs this machine's ranks in rounds, as node 0 orders. Node 0
makes the run's folder, holds its lock and decides; the others read from it what to run."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import secrets
import shlex
import socket
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import click
from pydantic import TypeAdapter

from pipeline.chain.plan import Plan, resolved
from pipeline.distributed.environment import ROUND, TOKEN
from pipeline.distributed.placement import NodePlacement, interfaces
from pipeline.distributed.process_group import in_one
from pipeline.distributed.settings import Attempts, ProcessCounts
from pipeline.distributed.signals import Interrupted
from pipeline.errors import RunFailed, RunStopped, UsageError, in_words
from pipeline.execution import failures, rundir
from pipeline.execution.failures import ON_EVERY_NODE
from pipeline.execution.journal import Journal
from pipeline.execution.rank_logging import say
from pipeline.execution.resume import ResumePlan, plan_resume
from pipeline.execution.run_spec import RunSpec, recipe_differences
from pipeline.launch.board import CONTACT_SECONDS, Board, connected, served, token
from pipeline.launch.job import Job, left_to_run, record_end
from pipeline.launch.ranks import LocalRanks, for_gpus, restarted, set_threads, supervise
from pipeline.launch.rounds import End, Greeting, Orders, Rounds, State
from pipeline.utils.processes import kill_descendants
from pipeline.view.screen import Screen

TURN_SECONDS = 0.5
"""Seconds between two exchanges of a node with node 0."""
LOOK_SECONDS = 0.2
"""Seconds between two looks of node 0 at all states."""
SILENCE = 1.2
"""Part of node 0's `timeouts.node` without new orders after which a node ends its ranks: by then
node 0 has given it up."""
SOON = 5.0
"""Seconds until a node says that it waits for others."""
LINGER_SECONDS = 10.0
"""Seconds that node 0 waits until the nodes that are there know how the run has ended."""
ARRIVAL_SECONDS = 30.0
"""Seconds that node 0 waits for the others to arrive when there is nothing to do."""
MOST_TEXT = 8000
"""Characters of a failure that are written."""
ORDERS, SPEC, HELLO, NODE = "orders", "spec", "hello", "node"
_STATE, _ORDERS, _GREETING = TypeAdapter(State), TypeAdapter(Orders), TypeAdapter(Greeting)


class Link:
    """This node's state for node 0 and the orders from there, exchanged in another thread: work of
    the main thread and a network that does not answer keep no one waiting."""

    def __init__(
        self, node: NodePlacement, secret: str, state: State, spec: str = "", address: str = ""
    ) -> None:
        self.state = state
        self.orders: Orders | None = None
        """The newest orders of the session that has greeted this node."""
        self.spec = spec
        """The run (`RunSpec.dump`)."""
        self.refusal = ""
        """Why node 0 does not take this node."""
        self.trouble = ""
        """Why there are no orders, as far as that is known."""
        self.address = address
        """This node's address on the way to node 0."""
        self._node, self._secret = node, secret
        self._session, self._number = "", 0
        self._written: State | None = None
        self._contact = self._turned = time.monotonic()
        self._failure: Exception | None = None
        self._wake, self._closed = threading.Event(), threading.Event()
        self._talks = 0
        self._thread = threading.Thread(target=self._run, name="pipe-nodes", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._closed.set()
        self._wake.set()
        # a thread that comes back from torch's client while Python ends would abort the process
        self._thread.join(2 * CONTACT_SECONDS)

    def tell(self, **changes: Any) -> None:
        """Change this node's state, and write it at once."""
        self.state = replace(self.state, **changes)
        self._wake.set()

    def flush(self) -> None:
        """Wait until this node's state is written, for a few turns at most."""
        deadline = time.monotonic() + 4 * TURN_SECONDS
        while self._written is not self.state and time.monotonic() < deadline:
            time.sleep(0.02)

    def silent_for(self) -> float:
        """Seconds since the last new orders, or since the start. Raises RunFailed where something
        unexpected has ended the exchange: no one would hear of this node any more."""
        if self._failure is not None:
            raise RunFailed(
                f"node {self._node.node_rank} cannot take part any more: "
                f"{in_words(self._failure)}\n{ON_EVERY_NODE}"
            ) from self._failure
        return time.monotonic() - self._contact

    def _run(self) -> None:
        """Keep a connection: one in which nothing moves any more is left to itself, since torch's
        client waits without a limit on a link that is cut."""
        while not self._closed.is_set() and self._failure is None:
            self._talks += 1
            self._turned = time.monotonic()
            talk = threading.Thread(target=self._talk, args=(self._talks,), daemon=True)
            talk.start()
            while talk.is_alive() and time.monotonic() - self._turned < 2 * CONTACT_SECONDS:
                talk.join(LOOK_SECONDS)
            self._closed.wait(TURN_SECONDS)

    def _talk(self, number: int) -> None:
        try:
            self._exchange(number)
        except (OSError, RuntimeError):  # of torch's store: `silent_for` counts the seconds
            pass
        except Exception as error:
            self._failure = error

    def _exchange(self, number: int) -> None:
        board = Board(connected(self._node.host, self._node.port), self._secret)
        self.address = own_address(self._node)
        self._session = ""  # another process may have taken this one's place meanwhile
        while number == self._talks and not self._closed.is_set():
            if time.monotonic() - self._turned > 4 * TURN_SECONDS:  # as after a freeze
                self._session = ""
            self._turned = time.monotonic()
            self._wake.clear()
            self._turn(board)
            self._wake.wait(TURN_SECONDS)

    def _turn(self, board: Board) -> None:
        rank, state, text = self._node.node_rank, self.state, board.read(ORDERS)
        self.trouble = "" if text else f"{TOKEN}, or the run, is another one there"
        orders = _ORDERS.validate_json(text) if text else None
        session = orders.session if orders else ""
        greeted = bool(session) and session == self._session
        own = replace(self._numbered(state), session=session)
        # a process that waits for another's place writes over nothing of it
        board.write(f"{NODE if greeted else HELLO}/{rank}", _STATE.dump_json(own).decode())
        self._written = state
        if not greeted:
            self._greeted(board, board.read(f"greeting/{rank}"))
        if orders is None or session != self._session:
            return
        if self.orders is None or orders.is_after(self.orders):
            self.orders, self._contact = orders, time.monotonic()

    def _greeted(self, board: Board, text: str | None) -> None:
        greeting = _GREETING.validate_json(text) if text else None
        if greeting is None or greeting.agent != self.state.agent:
            return
        self.refusal = greeting.refusal
        self.spec = board.read(f"{SPEC}/{greeting.session}") or ""
        self._session = greeting.session if self.spec else ""

    def _numbered(self, state: State) -> State:
        """The state with what counts it."""
        self._number += 1
        return replace(state, number=self._number, address=self.address)


class Lead(Link):
    """Node 0's: it serves the store, reads all states and writes the orders. Left, it waits until
    the other nodes know how the run has ended."""

    def __init__(self, node: NodePlacement, secret: str, rounds: Rounds, spec: str) -> None:
        """Raises UsageError if nothing can listen at the node's address, and RunFailed while
        another process does."""
        self.rounds, self._lock = rounds, threading.Lock()
        self._board = Board(served(node.host, node.port), secret)
        self._seen: dict[str, bytes] = {}
        super().__init__(node, secret, State.of(rounds.procs), spec, own_address(node))

    def __exit__(self, *error: Any) -> None:
        over = End(kind="finished")
        if error[0] is not None:
            stopped = isinstance(error[1], Interrupted | RunStopped)
            over = End(kind="stopped" if stopped else "raised", text=str(error[1])[:MOST_TEXT])

        def close() -> None:
            self.end(over, seconds=LINGER_SECONDS)
            Link.__exit__(self)

        if over.kind == "stopped":  # a second Ctrl-C ends the process
            close()
        else:  # the run's end is recorded: a signal changes no exit code any more
            record_end(close)

    def silent_for(self) -> float:
        """None: a loaded machine or a full network cannot cut this link."""
        super().silent_for()
        return 0.0

    def end(self, over: End, *, seconds: float, nodes: int = 0) -> None:
        """End the run, unless it has ended, and wait until all nodes, at least as many as `nodes`,
        know; at most for so long."""
        with self._lock:
            self.rounds.end(over)
        deadline, known = time.monotonic() + seconds, False
        while not known and time.monotonic() < deadline and self._failure is None:
            time.sleep(LOOK_SECONDS)
            with self._lock:
                known = self.rounds.known_by_all(nodes)

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._wake.clear()
                with contextlib.suppress(RuntimeError):  # of torch's store, for this time
                    self._lead()
                self._wake.wait(LOOK_SECONDS)
        except Exception as error:
            self._failure = error

    def _lead(self) -> None:
        names = [f"{kind}/{n}" for n in range(1, self._node.nodes) for kind in (HELLO, NODE)]
        own, session = self.state, self.rounds.orders.session
        first = replace(self._numbered(own), session=session)
        states, greetings = dict[str, State](), dict[str, Greeting | None]()
        for name, sealed in self._board.read_sealed(names):
            text = self._board.opened(name, sealed) if self._seen.get(name) != sealed else None
            self._seen[name] = sealed
            if text:
                states[name] = _STATE.validate_json(text)
        now = time.monotonic()
        with self._lock:
            self.rounds.greet(0, first, now)
            self.rounds.note(0, first, now)
            for name, state in states.items():
                kind, _, number = name.partition("/")
                if kind == HELLO:
                    greetings[number] = self.rounds.greet(int(number), state, now)
                self.rounds.note(int(number), state, now)
            orders = self.rounds.decide(now)
        self._board.write(ORDERS, _ORDERS.dump_json(orders).decode())
        self.orders, self._written = orders, own
        if any(greetings.values()):  # which are read before the run that they lead to
            self._board.write(f"{SPEC}/{session}", self.spec)
        for number, greeting in greetings.items():
            if greeting is not None:
                self._board.write(f"greeting/{number}", _GREETING.dump_json(greeting).decode())


@dataclass(eq=False)
class Agent:
    """Takes part in the run for this node."""

    plan: Plan
    found: NodePlacement
    link: Link
    screen: Screen = field(default_factory=Screen)
    folder: Path | None = None
    """The run's, on node 0, which records there what happens."""
    left: ResumePlan | None = None
    """What node 0 has found left to run; None once that has begun, and on other nodes."""

    def run(self) -> None:
        """Take part in the run to its end. Raises RunFailed if it fails or node 0 is not there, and
        Interrupted if it was stopped; node 0 hears of a signal to this process."""
        try:
            self._take_part()
        except Interrupted as interrupted:
            self.link.tell(end=End(kind="stopped", text=interrupted.cause))
            self.link.flush()
            raise

    def _take_part(self) -> None:
        link, begun = self.link, self._awaited(None, begins=True)
        while begun.over is None:
            link.tell(round=begun.round, end=None, landmarks=0)
            link.tell(end=self._run_round(begun))
            last = self._awaited(begun, begins=False)
            if last.over is None:
                if self.folder is not None:
                    rundir.require_kept(self.folder)
                    restarted(self.folder, self.plan, last.failure, last.restart, last.wait)
                link.tell(round=0, end=None, landmarks=0)
                last = self._awaited(begun, begins=True)
            begun = last
        link.tell(knows=True)
        link.flush()
        if begun.over.kind == "stopped":
            raise Interrupted(cause=begun.over.text)
        if begun.over.kind != "finished":
            raise RunFailed(begun.over.text, memory=begun.over.memory)

    def _awaited(self, begun: Orders | None, *, begins: bool) -> Orders:
        """The first orders by which another round than the one `begun` begins, or by which that has
        ended; or those that end the run. Says after a while that it waits for a round."""
        link, where = self.link, f"{self.found.host}:{self.found.port}"
        say_at = time.monotonic() + SOON if begins else math.inf
        limit = self.plan.recipe.launch.timeouts.rendezvous
        while True:
            orders = link.orders
            if link.refusal:
                raise UsageError(link.refusal)
            if orders is not None:
                runs_begun = orders.is_round_of(begun)
                if orders.over or (orders.runs and not runs_begun if begins else not runs_begun):
                    return orders
            why = f": {link.trouble}" if link.trouble else ""
            if time.monotonic() > say_at:
                say(f"node {self.found.node_rank} waits for the other nodes at {where}{why}")
                say_at = math.inf
            if link.silent_for() > limit:
                text = f"node 0 has not answered at {where} for {limit:.0f} s{why}"
                raise RunFailed(f"{text}\n{ON_EVERY_NODE}", restart="always")
            time.sleep(0.05)

    def _run_round(self, orders: Orders) -> End:
        """Run this node's ranks to their end. Whatever keeps it from that is reported: the other
        nodes would wait for this one."""
        here, settings = self.plan.per_node, self.plan.recipe.launch
        first_rank = self.found.node_rank * here
        try:
            spec = RunSpec.load(self.link.spec)
            run_dir = Path(spec.run_dir)
            common = interfaces(self.link.address) | {
                "LOCAL_WORLD_SIZE": str(here), "WORLD_SIZE": str(here * self.found.nodes),
                "MASTER_ADDR": self.found.host, "MASTER_PORT": str(self.found.port),
                ROUND: f"{orders.session}/{orders.round}",
            }  # fmt: skip
            places = [{"RANK": str(first_rank + n), "LOCAL_RANK": str(n)} for n in range(here)]
            self._require_same_run(spec)
            if first_rank == 0:  # what rank 0 is to run, all are
                failures.clear(run_dir, restart=True)  # also what ranks elsewhere wrote at the end
                journal = Journal(run_dir / rundir.JOURNAL)
                spec = spec.starting(self.left or plan_resume(self.plan, journal))
            self.left = None
            set_threads(settings, here)
            if self.plan.view.device == "cuda":
                common |= for_gpus(run_dir)
            ranks = LocalRanks([common | place for place in places])
            obey = functools.partial(self._obey, orders, ranks)
            with kill_descendants(self.screen.refresh), ranks:
                ranks.start(spec, output=self.screen.output)
                try:
                    supervise(ranks, settings, run_dir, obey)
                finally:
                    self.link.tell(landmarks=ranks.landmarks())
        except Interrupted as interrupted:
            return End(kind="stopped", text=interrupted.cause)
        except RunFailed as error:
            return End(
                kind=error.kind, text=str(error)[:MOST_TEXT], memory=error.memory, time=time.time(),
                restart="never" if error.stopping else error.restart,
            )  # fmt: skip
        except Exception as error:
            text = f"node {self.found.node_rank} ({self.link.state.host}): {in_words(error)}"
            return End(kind="raised", text=text[:MOST_TEXT], time=time.time())
        return End(kind="finished")

    def _require_same_run(self, spec: RunSpec) -> None:
        """Raise UsageError if the run's folder is not to be seen here or not safe, or if this
        node's recipe is another than node 0's."""
        run_dir = Path(spec.run_dir)
        if not (run_dir / rundir.RECIPE).is_file():
            raise UsageError(
                f"the run's folder {run_dir} is not to be seen here: it must lie where all nodes "
                "see it (--run-dir)"
            )
        rundir.require_safe(run_dir)
        commits = Journal(run_dir / rundir.JOURNAL).state().commits
        own = resolved(self.plan, commits, ask=False).recipe.public()
        if apart := recipe_differences(own, spec.recipe, f"on node 0 ({self.found.host})"):
            raise UsageError(
                f"this node's recipe is not node 0's: {in_one(apart)}",
                hint="give every node the same recipe and overrides",
            )

    def _obey(self, begun: Orders, ranks: LocalRanks, stop: Interrupted | None) -> None:
        """Do as node 0 orders: raise Interrupted for a stop, unless the ranks have been asked
        already, and RunFailed for the end of the round."""
        self.screen.refresh()
        link, limit, done = self.link, SILENCE * begun.lost_seconds, ranks.landmarks()
        if done != link.state.landmarks:
            link.tell(landmarks=done)
        if link.silent_for() > limit:
            raise RunFailed(
                f"node {self.found.node_rank} has lost its link to node 0 at {self.found.host}:"
                f"{self.found.port}: no answer for {limit:g} s (launch.timeouts.node)",
                restart="always",
            )
        assert link.orders is not None
        if not link.orders.is_round_of(begun):
            raise RunFailed("the round has ended", restart="always")
        if link.orders.stop and stop is None:
            raise Interrupted


def start_node(job: Job, found: NodePlacement) -> None:
    """Take part in the run as this node. Raises RunFailed, RunStopped, UsageError where a token is
    missing, and what the job raises."""
    secret = token(found.host)
    if secret is None and (found.node_rank or not found.by_hand):
        raise UsageError(
            f"{TOKEN} is not set, so whoever reaches node 0 at {found.host} could take part",
            hint="node 0 of a run that is started by hand makes one and prints the command for the "
            "others; so do scripts of `pipe launch`",
        )
    given = ProcessCounts(per_node=found.procs, nodes=found.nodes)
    if found.node_rank > 0:
        plan = job.plan(given)
        try:
            with Link(found, sealing(plan, found, secret), State.of(plan.per_node)) as link:
                Agent(plan, found, link).run()
        except Interrupted as interrupted:
            raise RunStopped(f"stopped by {interrupted}") from None
        return
    with job.locked_folder(given) as (plan, folder):
        if secret is None:
            secret = secrets.token_hex(16)
            command = shlex.join(["pipe", *sys.argv[1:]])
            others = re.sub(r"--node-rank[= ]0\b", "--node-rank NUMBER", command)
            how = f"{TOKEN} is not set, so this run has a new one. On every other node:"
            click.echo(f"{how}\n  {TOKEN}={secret} {others}", err=True)
        launch, spec = plan.recipe.launch, RunSpec.of(plan, folder, job.accept)
        rounds = Rounds(
            nodes=found.nodes, procs=plan.per_node, attempts=Attempts(launch.restarts),
            timeouts=launch.timeouts,
        )  # fmt: skip
        with Lead(found, sealing(plan, found, secret), rounds, spec.dump()) as link:
            left = left_to_run(plan, folder)
            if left is None:
                link.end(End(kind="finished"), seconds=ARRIVAL_SECONDS, nodes=found.nodes - 1)
                return
            with job.running(plan, folder) as screen:
                Agent(plan, found, link, screen, folder, left).run()


def sealing(plan: Plan, found: NodePlacement, secret: str | None) -> str:
    """The secret with which nodes of this run encrypt, and of no other: two may use one port."""
    return "\0".join((secret or "", plan.recipe.name, found.job))


def own_address(node: NodePlacement) -> str:
    """This machine's address on the way to node 0. Raises OSError for a host that is not known."""
    family, *_, address = socket.getaddrinfo(node.host, node.port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # which sends nothing
        return str(probe.getsockname()[0])

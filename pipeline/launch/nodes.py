"""One node of a run of several: it runs this machine's ranks in rounds, as node 0 orders. Node 0
makes the run's folder, holds its lock and decides; the others read from it what to run."""

from __future__ import annotations

import contextlib
import math
import re
import secrets
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from pydantic import TypeAdapter

from pipeline.chain.plan import Plan, resolved
from pipeline.distributed.environment import ROUND, TOKEN
from pipeline.distributed.placement import NodePlacement, interfaces
from pipeline.distributed.process_group import in_one
from pipeline.distributed.settings import Attempts, ProcessCounts
from pipeline.distributed.signals import Interrupted
from pipeline.errors import PipeError, RunFailed, RunStopped, UsageError, in_words
from pipeline.execution import rundir
from pipeline.execution.failures import ON_EVERY_NODE
from pipeline.execution.journal import Journal
from pipeline.execution.rank_logging import say
from pipeline.execution.resume import ResumePlan, plan_resume
from pipeline.execution.run_spec import RunSpec, recipe_differences
from pipeline.launch.board import CONTACT_SECONDS, Board, connected, served, token
from pipeline.launch.job import Job, left_to_run, recorded_start_and_end
from pipeline.launch.ranks import LocalRanks, for_gpus, restarted, set_threads, supervise
from pipeline.launch.rounds import End, Greeting, Orders, Over, Rounds, State
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
ORDERS, SPEC = "orders", "spec"
_STATE, _ORDERS, _GREETING = TypeAdapter(State), TypeAdapter(Orders), TypeAdapter(Greeting)


class Link(contextlib.AbstractContextManager["Link"]):
    """This node's state for node 0 and the orders from there, exchanged in another thread: work of
    the main thread and a network that does not answer keep no one waiting."""

    def __init__(self, node: NodePlacement, secret: str, state: State) -> None:
        self.state = state
        self.orders: Orders | None = None
        """The newest orders of the session that has greeted this node."""
        self.spec = ""
        """The run (`RunSpec.dump`)."""
        self.refusal = ""
        """Why node 0 does not take this node."""
        self.trouble = ""
        """Why there are no orders, as far as that is known."""
        self.address = ""
        """This node's address on the way to node 0."""
        self._node, self._secret = node, secret
        self._session, self._number = "", 0
        self._written: State | None = None
        self._contact = self._turned = time.monotonic()
        self._failure: Exception | None = None
        self._wake, self._closed = threading.Event(), threading.Event()
        self._talks = 0
        threading.Thread(target=self._run, name="pipe-nodes", daemon=True).start()

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._wake.set()

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
        while number == self._talks and not self._closed.is_set():
            self._turned = time.monotonic()
            self._wake.clear()
            self._turn(board)
            self._wake.wait(TURN_SECONDS)

    def _turn(self, board: Board) -> None:
        rank, known = self._node.node_rank, self._session
        if time.monotonic() - self._contact > 4 * TURN_SECONDS:
            known = ""  # node 0 may have been started again
        state = self.state
        board.write(f"node/{rank}", _STATE.dump_json(self._numbered(state, known)).decode())
        self._written = state
        if not known:
            self._greeted(board, board.read(f"greeting/{rank}"))
        text = board.read(ORDERS)
        self.trouble = "" if text else f"{TOKEN}, or the run, is another one there"
        orders = _ORDERS.validate_json(text) if text else None
        last = self.orders
        if orders is None or orders.session != self._session:
            return
        if last is None or last.session != orders.session or orders.number > last.number:
            self.orders, self._contact = orders, time.monotonic()

    def _greeted(self, board: Board, text: str | None) -> None:
        greeting = _GREETING.validate_json(text) if text else None
        if greeting is None or greeting.agent != self.state.agent:
            return
        self.refusal = greeting.refusal
        if self._session != greeting.session:
            self.spec = board.read(SPEC) or ""
            self._session = greeting.session if self.spec else ""

    def _numbered(self, state: State, session: str) -> State:
        """The state as it is to be written now."""
        self._number += 1
        return replace(state, session=session, number=self._number, address=self.address)


class Lead(Link):
    """Node 0's: it serves the store, reads all states and writes the orders."""

    def __init__(
        self, node: NodePlacement, secret: str, state: State, rounds: Rounds, spec: str
    ) -> None:
        """Raises UsageError if nothing can listen at the node's address."""
        self.rounds, self._lock = rounds, threading.Lock()
        self._board = Board(served(node.host, node.port), secret)
        self._seen: dict[str, bytes] = {}
        super().__init__(node, secret, state)
        self.spec, self.address = spec, own_address(node)

    def silent_for(self) -> float:
        """None: a loaded machine or a full network cannot cut this link."""
        super().silent_for()
        return 0.0

    def end(self, over: Over, *, seconds: float, nodes: int = 0) -> None:
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
        names = {f"node/{number}": number for number in range(1, self._node.nodes)}
        own = self.state
        states = {0: self._numbered(own, self.rounds.session)}
        for name, sealed in self._board.read_sealed([*names]):
            text = self._board.opened(name, sealed) if self._seen.get(name) != sealed else None
            self._seen[name] = sealed
            if text:
                states[names[name]] = _STATE.validate_json(text)
        now, greetings = time.monotonic(), dict[int, Greeting | None]()
        with self._lock:
            self.rounds.greet(0, states[0], now)
            for number, state in states.items():
                if state.session != self.rounds.session:
                    greetings[number] = self.rounds.greet(number, state, now)
                self.rounds.note(number, state, now)
            orders = self.rounds.orders(now)
        self.orders, self._written = orders, own
        self._board.write(SPEC, self.spec)
        self._board.write(ORDERS, _ORDERS.dump_json(orders).decode())  # after what it needs
        for number, greeting in greetings.items():
            if greeting is not None:
                self._board.write(f"greeting/{number}", _GREETING.dump_json(greeting).decode())


@dataclass(eq=False)
class Agent:
    """Takes part in the run for this node."""

    plan: Plan
    found: NodePlacement
    between: Callable[[], None]
    """Called now and then while no rank runs here."""
    screen: Screen
    left: ResumePlan | None = None
    """What node 0 has found left to run; None once that has begun, and on other nodes."""

    def run(self, link: Link) -> Over:
        """Take part in the run to its end, and return that. Raises RunFailed when node 0 is not
        there."""
        begun: Orders | None = None
        while True:
            begun = self._awaited(link, begun, begins=True)
            if begun.over is None:
                link.tell(round=begun.round, end=None, landmarks=0)
                link.tell(end=self._run_round(link, begun))
                last = self._awaited(link, begun, begins=False)
                if last.over is None:
                    link.tell(round=0, end=None, landmarks=0)
                    continue
                begun = last
            link.tell(knows=True)
            link.flush()
            assert begun.over is not None
            return begun.over

    def _awaited(self, link: Link, begun: Orders | None, *, begins: bool) -> Orders:
        """The first orders by which another round than the one `begun` begins, or by which that has
        ended; or those that end the run. Says after a while that it waits for a round."""
        say_at = time.monotonic() + SOON if begins else math.inf
        while True:
            if link.refusal:
                raise UsageError(link.refusal)
            orders = link.orders
            if orders is not None:
                runs_begun = orders.runs and same(orders, begun)
                due = orders.runs and not runs_begun if begins else not runs_begun
                if due or orders.over is not None:
                    return orders
            if time.monotonic() > say_at:
                where = f"{self.found.host}:{self.found.port}"
                why = f" ({link.trouble})" if link.trouble else ""
                say(f"node {self.found.node_rank} waits for the other nodes at {where}{why}")
                say_at = math.inf
            self._pause(link)

    def _pause(self, link: Link) -> None:
        self.between()
        try:
            time.sleep(0.05)
        except Interrupted as interrupted:
            link.tell(stopping=str(interrupted))
            link.flush()
            raise
        limit = self.plan.recipe.launch.timeouts.rendezvous
        if link.silent_for() > limit:
            reason = f": {link.trouble}" if link.trouble else ""
            raise RunFailed(
                f"node 0 has not answered at {self.found.host}:{self.found.port} for {limit:.0f} s"
                f"{reason}\n{ON_EVERY_NODE}",
                restart="always",
            )

    def _run_round(self, link: Link, orders: Orders) -> End:
        """Run this node's ranks to their end. Whatever keeps it from that is reported: the other
        nodes would wait for this one."""
        spec, settings, per_node = (
            RunSpec.load(link.spec),
            self.plan.recipe.launch,
            self.plan.per_node,
        )
        run_dir, first_rank = Path(spec.run_dir), self.found.node_rank * per_node
        place = {
            "LOCAL_WORLD_SIZE": per_node, "WORLD_SIZE": per_node * self.found.nodes,
            "MASTER_ADDR": self.found.host, "MASTER_PORT": self.found.port,
            ROUND: f"{orders.session}/{orders.round}",
        }  # fmt: skip

        def obey(interrupted: Interrupted | None) -> None:
            self.screen.refresh()
            self._obey(link, orders, ranks, interrupted)

        try:
            self._require_same_run(spec)
            if first_rank == 0:  # what rank 0 is to run, all are
                journal = Journal(run_dir / rundir.JOURNAL)
                spec = spec.starting(self.left or plan_resume(self.plan, journal))
            self.left = None
            set_threads(settings, per_node)
            common = interfaces(link.address)
            common |= {name: str(value) for name, value in place.items()}
            if self.plan.view.device == "cuda":
                common |= for_gpus(run_dir)
            numbers = range(per_node)
            ranks = LocalRanks(
                [common | {"RANK": str(first_rank + n), "LOCAL_RANK": str(n)} for n in numbers]
            )
            with kill_descendants(self.screen.refresh), ranks:
                ranks.start(spec, output=self.screen.output)
                supervise(ranks, settings, run_dir, obey)
        except Interrupted as interrupted:
            return End(kind="stopped", text=interrupted.cause)
        except RunFailed as error:
            return End(
                kind=error.kind, text=str(error)[:MOST_TEXT], restart=error.restart,
                memory=error.memory, time=time.time(),
            )  # fmt: skip
        except (PipeError, OSError) as error:
            text = f"node {self.found.node_rank} ({link.state.host}): {in_words(error)}"
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

    def _obey(
        self, link: Link, begun: Orders, ranks: LocalRanks, interrupted: Interrupted | None
    ) -> None:
        """Do as node 0 orders: raise Interrupted for a stop, unless the ranks have been
        `interrupted` already, and RunFailed for the end of the round. A signal to this process is
        written for the others, however its ranks end."""
        if interrupted is not None and interrupted.cause != link.state.stopping:
            link.tell(stopping=interrupted.cause)
        done = ranks.landmarks()
        if done != link.state.landmarks:
            link.tell(landmarks=done)
        orders = link.orders
        assert orders is not None
        limit = SILENCE * begun.lost_seconds
        if link.silent_for() > limit:
            raise RunFailed(
                f"node {self.found.node_rank} has lost its link to node 0 at {self.found.host}:"
                f"{self.found.port}: no answer for {limit:g} s (launch.timeouts.node)",
                restart="always",
            )
        if orders.over or not orders.runs or not same(orders, begun):
            raise RunFailed("the round has ended", restart="always")
        if orders.stop and interrupted is None:
            raise Interrupted


def same(orders: Orders, other: Orders | None) -> bool:
    """Whether these are orders of one round."""
    return other is not None and (orders.session, orders.round) == (other.session, other.round)


def start_node(job: Job, found: NodePlacement) -> None:
    """Take part in the run as this node. Raises RunFailed, RunStopped, UsageError where a token is
    missing, and what the job raises."""
    secret = token(found.host)
    if secret is None and (found.node_rank or found.job):
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
                _conclude(Agent(plan, found, lambda: None, Screen()).run(link))
        except Interrupted as interrupted:
            raise RunStopped(f"stopped by {interrupted}") from None
        return
    with job.locked_folder(given) as (plan, folder):
        launch, spec = plan.recipe.launch, RunSpec.of(plan, folder, job.accept)
        attempts = Attempts(launch.restarts)
        rounds = Rounds(
            nodes=found.nodes, procs=plan.per_node, attempts=attempts, timeouts=launch.timeouts
        )
        if secret is None:
            secret = secrets.token_hex(16)
            _print_command(secret)

        def record() -> None:
            """Record restarts, while no rank runs here."""
            if rounds.notes:
                rundir.require_kept(folder)
            while rounds.notes:
                restarted(folder, plan, *rounds.notes.pop(0))

        own, sealed_with = State.of(plan.per_node), sealing(plan, found, secret)
        with _led(Lead(found, sealed_with, own, rounds, spec.dump())) as link:
            left = left_to_run(plan, folder)
            if left is None:
                over = Over(kind="finished")
                link.end(over, seconds=ARRIVAL_SECONDS, nodes=found.nodes - 1)
                return
            with (
                job.display.to_the_end(),
                recorded_start_and_end(plan, folder),
                job.meanwhile(plan, folder),
                job.display.shown(plan, folder) as screen,
            ):
                _conclude(Agent(plan, found, record, screen, left).run(link))


def sealing(plan: Plan, found: NodePlacement, secret: str | None) -> str:
    """What nodes of this run seal with, and none of another: two may come by one port."""
    return "\0".join((secret or "", plan.recipe.name, found.job))


@contextlib.contextmanager
def _led(link: Lead) -> Iterator[Lead]:
    """Lead the other nodes, until they know how the run has ended."""
    with link:
        over = Over(kind="finished")
        try:
            yield link
        except BaseException as error:
            kind: Any = "stopped" if isinstance(error, Interrupted | RunStopped) else "failed"
            over = Over(kind=kind, text=(str(error) or type(error).__name__)[:MOST_TEXT])
            raise
        finally:
            link.end(over, seconds=LINGER_SECONDS)


def _conclude(over: Over) -> None:
    """Raise the error that a run's end stands for, if it does."""
    if over.kind == "failed":
        raise RunFailed(over.text, memory=over.memory)
    if over.kind == "refused":
        raise UsageError(over.text)
    if over.kind == "stopped":
        raise Interrupted(told=over.text)


def _print_command(secret: str) -> None:
    """Print the command that the other nodes need: this one's, with the token."""
    command = shlex.join(["pipe", *sys.argv[1:]])
    others = re.sub(r"--node-rank[= ]0\b", "--node-rank NUMBER", command)
    click.echo(f"{TOKEN} is not set, so this run has a new one. On every other node:", err=True)
    click.echo(f"  {TOKEN}={secret} {others}", err=True)


def own_address(node: NodePlacement) -> str:
    """This machine's address on the way to node 0. Raises OSError for a host that is not known."""
    family, *_, address = socket.getaddrinfo(node.host, node.port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # which sends nothing
        return str(probe.getsockname()[0])

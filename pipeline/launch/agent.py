"""One node of a run of several: beats, and runs this machine's ranks as the coordinator says."""

from __future__ import annotations

import math
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from pipeline.chain.plan import Plan
from pipeline.distributed.placement import NodePlacement
from pipeline.distributed.signals import Interrupted
from pipeline.errors import PipeError, RunFailed, UsageError, in_words
from pipeline.execution import rundir
from pipeline.execution.failures import ON_EVERY_NODE
from pipeline.execution.journal import Journal
from pipeline.execution.rank_logging import say
from pipeline.execution.resume import ResumePlan, plan_resume
from pipeline.execution.run_spec import RunSpec
from pipeline.launch.exchange import BEAT_SECONDS, Link, Server
from pipeline.launch.messages import MOST_TEXT, Beat, Over, Place, Reply, Report
from pipeline.launch.ranks import LocalRanks, for_gpus, set_threads, supervise
from pipeline.recipe import load_recipe
from pipeline.utils.processes import kill_descendants
from pipeline.view.screen import Screen

SILENCE = 1.2
"""Part of node 0's `timeouts.node` without an answer after which this node ends its ranks: by then
the others continue without it."""
SOON = 5.0
"""Seconds until a node says that it waits for others."""


@dataclass(eq=False)
class Agent:
    """This node's agent."""

    plan: Plan
    found: NodePlacement
    between: Callable[[], None]
    """Called now and then while no rank runs here."""
    screen: Screen
    server: Server | None = None
    """In node 0's process."""
    left: ResumePlan | None = None
    """What node 0 has found left to run; None once that has begun, and on other nodes."""

    def run(self) -> Over:
        """Take part in the run to its end, and return that. Raises RunFailed when node 0 is not
        there."""
        beat = Beat(
            agent=uuid.uuid4().hex,
            run=run_name(self.plan, self.found),
            node=self.found.node_rank,
            host=socket.gethostname(),
            procs=self.plan.per_node,
            port=_free_port(),
        )
        with Link(self.found.host, self.found.port, beat, self.server) as link:
            while True:
                reply = self._awaited(link, lambda r, n: r.over or (r.place and r.round > n), SOON)
                if reply.over is not None:
                    return reply.over
                assert reply.place is not None
                link.tell(round=reply.round, report=None, landmarks=0)
                link.tell(report=self._run_round(link, reply, reply.place))
                self._awaited(link, lambda r, n: r.over or r.place is None or r.round != n)
                link.tell(round=0, report=None, landmarks=0, port=_free_port())

    def _awaited(
        self, link: Link, due: Callable[[Reply, int], object], say_after: float = math.inf
    ) -> Reply:
        """The coordinator's first reply that is `due` in this node's round, which is 0 while it
        waits for one. Say that it waits after so many seconds."""
        say_at = time.monotonic() + say_after
        while True:
            reply = link.reply
            if reply is not None and due(reply, link.beat.round):
                return reply
            if time.monotonic() > say_at:
                where = f"{self.found.host}:{self.found.port}"
                say(f"node {self.found.node_rank} waits for the other nodes at {where}")
                say_at = math.inf
            self._pause(link)

    def _pause(self, link: Link) -> None:
        self.between()
        try:
            time.sleep(0.05)
        except Interrupted as interrupted:
            link.tell(stopping=str(interrupted))
            time.sleep(2 * BEAT_SECONDS)  # until node 0 has heard of it
            raise
        limit = self.plan.recipe.launch.timeouts.rendezvous
        if link.silent_for() > limit:
            reason = f": {link.refused}" if link.refused else ""
            raise RunFailed(
                f"node 0 has not answered at {self.found.host}:{self.found.port} for {limit:.0f} s"
                f"{reason}\n{ON_EVERY_NODE}",
                restart="always",
            )

    def _run_round(self, link: Link, reply: Reply, place: Place) -> Report:
        """Run this node's ranks to their end. Whatever keeps it from that is reported: the other
        nodes would wait for this one."""
        spec, settings = RunSpec.load(reply.spec), self.plan.recipe.launch
        run_dir, per_node = Path(spec.run_dir), self.plan.per_node

        def obey(interrupted: Interrupted | None) -> None:
            self.screen.refresh()
            self._obey(link, reply, ranks, interrupted)

        try:
            self._require_folder(spec)
            if place.first_rank == 0:  # what rank 0 is to run, all are
                journal = Journal(run_dir / rundir.JOURNAL)
                spec = spec.starting(self.left or plan_resume(self.plan, journal))
            self.left = None
            set_threads(settings, per_node)
            common = _interfaces(link.address)
            if self.plan.view.device == "cuda":
                common |= for_gpus(run_dir)
            ranks = LocalRanks([common | _place(place, n, per_node) for n in range(per_node)])
            with kill_descendants(self.screen.refresh), ranks:
                ranks.start(spec, output=self.screen.output)
                supervise(ranks, settings, run_dir, obey)
        except Interrupted as interrupted:
            return Report(kind="stopped", text=interrupted.cause)
        except RunFailed as error:
            return Report(
                kind=error.kind,
                text=str(error)[:MOST_TEXT],
                restart=error.restart,
                memory=error.memory,
                time=time.time(),
            )
        except (PipeError, OSError) as error:
            text = f"node {link.beat.node} ({link.beat.host}): {in_words(error)}"
            return Report(kind="raised", text=text[:MOST_TEXT], time=time.time())
        return Report(kind="finished")

    def _require_folder(self, spec: RunSpec) -> None:
        """Raise UsageError if the run's folder is not to be seen here or not safe, or holds another
        recipe: without a secret, node 0 may be somebody else, who cannot write there."""
        run_dir = Path(spec.run_dir)
        if not (run_dir / rundir.RECIPE).is_file():
            raise UsageError(
                f"the run's folder {run_dir} is not to be seen here: it must lie where all nodes "
                "see it (--run-dir)"
            )
        rundir.require_safe(run_dir)
        if load_recipe(run_dir / rundir.RECIPE).public() != spec.recipe:
            raise UsageError(f"node 0 runs another recipe than {run_dir / rundir.RECIPE}")

    def _obey(
        self, link: Link, begun: Reply, ranks: LocalRanks, interrupted: Interrupted | None
    ) -> None:
        """Do as the coordinator says: raise Interrupted for a stop, unless the ranks have been
        `interrupted` already, and RunFailed for the end of the round. A signal to this process is
        reported to the others, however its ranks end."""
        if interrupted is not None and interrupted.cause != link.beat.stopping:
            link.tell(stopping=interrupted.cause)
        done = ranks.landmarks()
        if done != link.beat.landmarks:
            link.tell(landmarks=done)
        reply = link.reply
        assert reply is not None
        limit = SILENCE * reply.lost_seconds
        if link.silent_for() > limit:
            raise RunFailed(
                f"node {self.found.node_rank} has lost its link to node 0 at {self.found.host}:"
                f"{self.found.port}: no answer for {limit:g} s (launch.timeouts.node)",
                restart="always",
            )
        if reply.over or reply.place is None or reply.round != begun.round:
            raise RunFailed("the round has ended", restart="always")
        if reply.stop and interrupted is None:
            raise Interrupted


def run_name(plan: Plan, found: NodePlacement) -> str:
    """The name of a run, which all of its nodes know, and none of another run's."""
    return f"{plan.recipe.name} ({found.job})" if found.job else plan.recipe.name


def _place(place: Place, number: int, per_node: int) -> dict[str, str]:
    """Environment of the rank with this number on its node."""
    return {
        "RANK": str(place.first_rank + number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(per_node),
        "MASTER_ADDR": place.master,
        "MASTER_PORT": str(place.port),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _interfaces(address: str) -> dict[str, str]:
    """Variables that bind gloo and NCCL to the interface with this address, unless they are set."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in {entry.address for entry in addresses}:
            variables = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
            return {key: os.environ.get(key, value) for key, value in variables.items()}
    return {}

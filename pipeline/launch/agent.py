"""One node of a run of several: beats, and runs this machine's ranks as the coordinator says."""

from __future__ import annotations

import math
import os
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

from pipeline.chain.plan import Plan
from pipeline.distributed.placement import NodePlacement
from pipeline.distributed.signals import Interrupted
from pipeline.errors import RunFailed, UsageError, in_words
from pipeline.execution import rundir
from pipeline.execution.failures import ON_EVERY_NODE
from pipeline.execution.journal import Journal
from pipeline.execution.rank_logging import say
from pipeline.execution.resume import plan_resume
from pipeline.execution.run_spec import RunSpec
from pipeline.launch.exchange import BEAT_SECONDS, Link, OwnLink, Server
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


class _RoundOverError(Exception):
    """The round has ended elsewhere, or no one answers any more."""


class Agent:
    """This node's agent."""

    def __init__(
        self,
        plan: Plan,
        found: NodePlacement,
        between: Callable[[], None],
        screen: Screen,
        server: Server | None = None,
    ) -> None:
        """`between` is called now and then while no rank runs here. `server` runs in node 0's
        process."""
        self._server = server
        self._screen = screen
        self._plan, self._settings = plan, plan.recipe.launch
        self._host, self._port = found.host, found.port
        self._node, self._between = found.node_rank, between
        self._run = run_name(plan, found)

    def run(self) -> Over:
        """Take part in the run to its end, and return that. Raises RunFailed when node 0 is not
        there."""
        beat = Beat(
            agent=uuid.uuid4().hex,
            run=self._run,
            node=self._node,
            host=socket.gethostname(),
            procs=self._plan.per_node,
            port=_free_port(),
        )
        where, own = (self._host, self._port, beat), self._server
        with Link(*where) if own is None else OwnLink(own, *where) as link:
            while True:
                reply = self._wait_for_round(link)
                if reply.over is not None:
                    return reply.over
                assert reply.place is not None
                link.tell(round=reply.round, report=None, landmarks=0)
                report = self._run_round(link, reply, reply.place)
                link.tell(report=report)
                self._wait_until_over(link, reply.round)
                link.tell(round=0, report=None, landmarks=0, port=_free_port())

    def _wait_for_round(self, link: Link) -> Reply:
        """The reply that assigns this node a place, or ends the run."""
        last, say_at = link.beat.round, time.monotonic() + SOON
        while True:
            reply = link.reply
            if reply is not None and (reply.over or (reply.place and reply.round > last)):
                return reply
            if time.monotonic() > say_at:
                say(f"node {self._node} waits for the other nodes at {self._host}:{self._port}")
                say_at = math.inf
            self._pause(link)

    def _wait_until_over(self, link: Link, number: int) -> None:
        """Wait until the coordinator has ended the round, or the run."""
        while True:
            reply = link.reply
            if reply is not None and (reply.over or reply.place is None or reply.round != number):
                return
            self._pause(link)

    def _pause(self, link: Link) -> None:
        self._between()
        try:
            time.sleep(0.05)
        except Interrupted as interrupted:
            link.tell(stopping=str(interrupted))
            time.sleep(2 * BEAT_SECONDS)  # until node 0 has heard of it
            raise
        limit = self._settings.timeouts.rendezvous
        if link.silent_for() > limit:
            reason = f": {link.refused}" if link.refused else ""
            raise RunFailed(
                f"node 0 has not answered at {self._host}:{self._port} for {limit:.0f} s{reason}\n"
                f"{ON_EVERY_NODE}",
                restart="always",
            )

    def _run_round(self, link: Link, reply: Reply, place: Place) -> Report:
        """Run this node's ranks to their end."""
        spec = RunSpec.load(reply.spec)
        run_dir = Path(spec.run_dir)
        try:
            self._require_folder(spec, link.beat.host)
            if place.first_rank == 0:  # what rank 0 is to run, all are
                journal = Journal(run_dir / rundir.JOURNAL)
                spec = spec.starting(plan_resume(self._plan, journal))
        except UsageError as error:
            return Report(kind="raised", text=str(error), time=time.time())
        set_threads(self._settings, self._plan.per_node)
        common = _interfaces(link.address)
        if self._plan.view.device == "cuda":
            common |= for_gpus(run_dir)
        per_node = self._plan.per_node
        ranks = LocalRanks([common | _place(place, n, per_node) for n in range(per_node)])
        try:
            with kill_descendants(self._screen.refresh), ranks:
                ranks.start(spec, output=self._screen.output)

                def obey(interrupted: Interrupted | None) -> None:
                    self._screen.refresh()
                    self._obey(link, reply, ranks, interrupted)

                supervise(ranks, self._settings, run_dir, obey)
        except OSError as error:
            text = f"the processes of node {self._node} could not be started: {in_words(error)}"
            return Report(kind="raised", text=text, time=time.time())
        except Interrupted as interrupted:
            return Report(kind="stopped", text=interrupted.cause)
        except _RoundOverError as over:
            return Report(kind="raised", text=str(over), restart="always", time=time.time())
        except RunFailed as error:
            text = str(error)[:MOST_TEXT]
            return Report(
                kind=error.kind,
                text=text,
                restart=error.restart,
                memory=error.memory,
                time=time.time(),
            )
        return Report(kind="finished")

    def _require_folder(self, spec: RunSpec, host: str) -> None:
        """Raise UsageError if the run's folder is not to be seen here or not safe, or holds another
        recipe: without a secret, node 0 may be somebody else, who cannot write there."""
        run_dir = Path(spec.run_dir)
        if not (run_dir / rundir.RECIPE).is_file():
            raise UsageError(
                f"node {self._node} ({host}) does not see the run's folder {run_dir}: it must lie "
                "where all nodes see it (--run-dir)"
            )
        rundir.require_safe(run_dir)
        if load_recipe(run_dir / rundir.RECIPE).public() != spec.recipe:
            raise UsageError(f"node 0 runs another recipe than {run_dir / rundir.RECIPE}")

    def _obey(
        self, link: Link, begun: Reply, ranks: LocalRanks, interrupted: Interrupted | None
    ) -> None:
        """Do as the coordinator says: raise Interrupted for a stop, unless the ranks have been
        `interrupted` already, and _RoundOverError for the end of the round. A signal to this
        process is reported to the others, however its ranks end."""
        if interrupted is not None and interrupted.cause != link.beat.stopping:
            link.tell(stopping=interrupted.cause)
        done = ranks.landmarks()
        if done != link.beat.landmarks:
            link.tell(landmarks=done)
        reply = link.reply
        assert reply is not None
        limit = SILENCE * reply.lost_seconds
        if link.silent_for() > limit:
            where = f"{self._host}:{self._port}"
            raise _RoundOverError(
                f"node {self._node} has lost its link to node 0 at {where}: no answer for "
                f"{limit:g} s (launch.timeouts.node)"
            )
        if reply.over or reply.place is None or reply.round != begun.round:
            raise _RoundOverError("the round has ended")
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

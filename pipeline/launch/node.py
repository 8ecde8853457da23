"""Start one node of a run of several. Node 0 makes the run's folder, holds its lock and decides for
all; the others learn from it what to run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from pipeline.distributed.placement import NodePlacement
from pipeline.distributed.settings import Attempts, ProcessCounts
from pipeline.distributed.signals import Interrupted
from pipeline.errors import RunFailed, RunStopped, UsageError
from pipeline.execution import rundir
from pipeline.execution.run_spec import RunSpec
from pipeline.launch.agent import Agent, run_name
from pipeline.launch.coordinator import Coordinator
from pipeline.launch.exchange import Server
from pipeline.launch.job import Job, left_to_run, recorded_start_and_end
from pipeline.launch.messages import MOST_TEXT, Over
from pipeline.launch.ranks import restarted
from pipeline.launch.wire import token
from pipeline.view.screen import Screen

LINGER_SECONDS = 10.0
"""Seconds that node 0 waits until the nodes that are there know how the run has ended."""
ARRIVAL_SECONDS = 30.0
"""Seconds that node 0 waits for the others to arrive when there is nothing to do."""


def start_node(job: Job, found: NodePlacement) -> None:
    """Take part in the run as this node. Raises RunFailed, RunStopped, UsageError where strangers
    could take part too, and what the job raises."""
    token(found.host)  # first, while nothing has been started
    given = ProcessCounts(per_node=found.procs, nodes=found.max_nodes)
    if found.node_rank > 0:
        plan = job.plan(given)
        try:
            _conclude(Agent(plan, found, lambda: None, Screen()).run())
        except Interrupted as interrupted:
            raise RunStopped(f"stopped by {interrupted}") from None
        return
    with job.locked_folder(given) as (plan, folder):
        launch = plan.recipe.launch
        coordinator = Coordinator(
            fewest=min(found.min_nodes, launch.fewest_nodes or found.min_nodes),
            most=found.max_nodes,
            attempts=Attempts(launch.restarts),
            rendezvous_seconds=launch.timeouts.rendezvous,
            lost_seconds=launch.timeouts.node,
            run=run_name(plan, found),
            spec=RunSpec.of(plan, folder, job.accept).dump(),
        )

        def record() -> None:
            """Record restarts, while no rank runs here."""
            if coordinator.notes:
                rundir.require_kept(folder)
            while coordinator.notes:
                restarted(folder, plan, *coordinator.notes.pop(0))

        with _served(coordinator, found) as server:
            left = left_to_run(plan, folder)
            if left is None:
                coordinator.end(Over(kind="finished"))
                server.linger(ARRIVAL_SECONDS, nodes=found.max_nodes - 1)
                return
            with (
                job.display.to_the_end(),
                recorded_start_and_end(plan, folder),
                job.meanwhile(plan, folder),
                job.display.shown(plan, folder) as screen,
            ):
                _conclude(Agent(plan, found, record, screen, server, left).run())


@contextlib.contextmanager
def _served(coordinator: Coordinator, found: NodePlacement) -> Iterator[Server]:
    """Answer other nodes, until they know how the run has ended."""
    with Server(coordinator, found.host, found.port) as server:
        try:
            yield server
        except BaseException as error:
            kind: Any = "stopped" if isinstance(error, Interrupted | RunStopped) else "failed"
            text = str(error) or type(error).__name__
            coordinator.end(Over(kind=kind, text=text[:MOST_TEXT]))
            raise
        finally:
            server.linger(LINGER_SECONDS)


def _conclude(over: Over) -> None:
    """Raise the error that a run's end stands for, if it does."""
    if over.kind == "failed":
        raise RunFailed(over.text, memory=over.memory)
    if over.kind == "refused":
        raise UsageError(over.text)
    if over.kind == "stopped":
        raise Interrupted(told=over.text)

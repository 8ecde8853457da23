"""What the person who stops a run is told at once, while the ranks save."""

from __future__ import annotations

import signal
from pathlib import Path

import click

from pipeline.distributed.heartbeat import Phase
from pipeline.distributed.signals import Interrupted, at_second_interrupt
from pipeline.execution import failures, rundir
from pipeline.execution.metrics import saved_step
from pipeline.launch.ranks import LocalRanks


def announce(interrupted: Interrupted, ranks: LocalRanks, run_dir: Path) -> None:
    """Say what a signal to this process brings about, and have a second Ctrl-C say how to go on."""
    phases = {ranks.heartbeats.read(number).phase for number in range(len(ranks.places))}
    trains = bool(phases - {Phase.LOAD})
    at_second_interrupt(f"stopped by a second SIGINT\n{failures.continuation(run_dir)}\n")
    if not interrupted.cause or ranks.ends():
        return  # another process got it, and has said so
    does = "saving after this step, then stopping" if trains else "stopping"
    again = f"; again: stop now{_loss(run_dir) if trains else ''}"
    is_interrupt = interrupted.number == signal.SIGINT
    click.echo(f"{interrupted.cause}: {does}{again if is_interrupt else ''}", err=True)


def _loss(run_dir: Path) -> str:
    """Say which steps a kill costs."""
    saved = saved_step(run_dir / rundir.METRICS)
    where = "the newest checkpoint" if saved is None else f"step {saved}"
    return f" and lose the steps since {where}"

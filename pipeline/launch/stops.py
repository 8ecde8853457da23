"""What the person who stops a run is told at once, while the ranks save."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import click

from pipeline.distributed.heartbeat import Phase
from pipeline.distributed.signals import Interrupted, at_second_interrupt
from pipeline.execution import failures, rundir
from pipeline.execution.metrics import saved_step
from pipeline.launch.ranks import LocalRanks


def announce(interrupted: Interrupted, ranks: LocalRanks, run_dir: Path) -> None:
    """Say what a signal to this process brings about in a training, where ranks do not end at once,
    and have a second Ctrl-C say how to go on."""
    at_second_interrupt(f"stopped by a second SIGINT\n{failures.continuation(run_dir)}\n")
    phases = {ranks.heartbeats.read(number).phase for number in range(len(ranks.places))}
    if phases == {Phase.LOAD} or not interrupted.cause or ranks.ends():
        return  # also where another process got it, which has said so
    again = f"; again: stop now and lose the steps since {_saved(run_dir)}"
    how = again if interrupted.number == signal.SIGINT else ""
    with contextlib.suppress(OSError):  # a closed terminal
        click.echo(f"{interrupted.cause}: saving after this step, then stopping{how}", err=True)


def _saved(run_dir: Path) -> str:
    with contextlib.suppress(OSError):  # the folder may be gone
        step = saved_step(run_dir / rundir.METRICS)
        if step is not None:
            return f"step {step}"
    return "the newest checkpoint"

"""All runs of a benchmark, one after another."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from pipeline.bench.measure import measure
from pipeline.bench.results import Row, with_efficiency
from pipeline.bench.trials import Length, Written
from pipeline.launch.signals import Interrupted, interruptible
from pipeline.plan import Plan
from pipeline.registry import Registry

STOP_SECONDS = 60.0
"""How long this process may take to end when it is stopped; the run gets half of it."""
TRIALS = "trials"
"""Folder of the runs' own folders in that of the benchmark."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the runs came to."""

    rows: Sequence[Row]
    """Of those that ended, with their efficiency."""
    stopped: signal.Signals | None
    """What kept the others from it."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """What the runs of a benchmark have in common."""

    plan: Plan
    """Of the recipe itself."""
    length: Length
    trials: Sequence[Written]
    folder: Path
    """Of the benchmark, with an empty one for its runs."""
    threads: int | None
    """Of every process; None where the launcher decides."""
    minutes: int
    """Longest time of a run."""
    keep: bool
    registry: Registry

    def run(self, save: Callable[[Sequence[Row]], None]) -> Outcome:
        """Measure each trial, and `save` the rows whenever there is one more; what goes on is told
        on standard error. A signal ends it early, and loses the run that it interrupts alone."""
        rows: list[Row] = []
        stopped = None
        try:
            with interruptible(force_after=STOP_SECONDS):
                for trial in self.trials:
                    rows = with_efficiency([*rows, self._measured(trial)])
                    save(rows)
        except Interrupted as interrupted:
            stopped = interrupted.number
        with contextlib.suppress(OSError):  # runs that failed, and those to keep, are in it
            (self.folder / TRIALS).rmdir()
        return Outcome(rows=rows, stopped=stopped)

    def missing(self, rows: Sequence[Row]) -> list[str]:
        """Labels of the trials that are not among the rows."""
        return [trial.row.label for trial in self.trials[len(rows) :]]

    def _measured(self, trial: Written) -> Row:
        click.echo(trial.row.label, err=True)
        row = measure(
            trial.row,
            trial.text,
            self.folder / TRIALS / f"{trial.row.strategy}-{trial.row.procs}",
            warmup=self.length.warmup,
            minutes=self.minutes,
            keep=self.keep,
            registry=self.registry,
        )
        speed = row.speed and f"{row.speed.median:,.0f} tokens/s"
        click.echo(f"  {speed or row.error}", err=True)
        return row

"""All runs of a benchmark, one after another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from pipeline.bench.measure import measure
from pipeline.bench.results import Row, with_efficiency
from pipeline.bench.trials import Length, write
from pipeline.errors import RunStopped
from pipeline.launch.signals import Interrupted, interruptible
from pipeline.plan import Plan
from pipeline.presets import Strategy
from pipeline.registry import Registry

STOP_SECONDS = 60.0
"""How long this process may take to end when it is stopped; the run gets half of it."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """What the runs of a benchmark have in common."""

    plan: Plan
    """Of the recipe itself."""
    length: Length
    folder: Path
    most: int
    """Processes of the largest run."""
    keep: bool
    registry: Registry

    def run(self, strategies: Sequence[Strategy], counts: Sequence[int]) -> list[Row]:
        """A row for each strategy and number of processes; what goes on is told on standard error.
        Raises RunStopped."""
        try:
            with interruptible(force_after=STOP_SECONDS):
                rows = list(self._rows(strategies, counts))
        except Interrupted as interrupted:
            number = interrupted.number
            raise RunStopped(number, f"stopped by {number.name}") from None
        with contextlib.suppress(OSError):  # runs that failed, and those to keep, are in it
            self._runs.rmdir()
        return with_efficiency(rows)

    @property
    def _runs(self) -> Path:
        return self.folder / "runs"

    def _rows(self, strategies: Sequence[Strategy], counts: Sequence[int]) -> Iterator[Row]:
        for strategy in strategies:
            for count in counts:
                row = self._row(strategy, count)
                speed = row.speed and f"{row.speed.median:,.0f} tokens/s"
                click.echo(f"  {speed or row.error}", err=True)
                yield row

    def _row(self, strategy: Strategy, procs: int) -> Row:
        written = write(
            self.plan, strategy, procs, self.length, most=self.most, registry=self.registry
        )
        row = Row(strategy=strategy.name, use=strategy.use, procs=procs, note=written.note)
        click.echo(row.label, err=True)
        return measure(
            row,
            written.text,
            self._runs / f"{strategy.name}-{procs}",
            warmup=self.length.warmup,
            keep=self.keep,
            registry=self.registry,
        )

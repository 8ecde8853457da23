"""Measure what watching a run costs it: the live display, metrics and trackers.

    python benchmarks/watching.py [--rounds N] [--steps N] [--batch N] [--json FILE]

A training runs twice a round, in turns: quiet and without trackers, and drawn in a terminal of its
own with two trackers. See docs/dev/results.md. Exits 1 when watched steps take more than 1 %
longer, both all steps together and in the median pair.
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import raw
import torch
from watching_run import TEXT, WORDS, Run, measure

from pipeline.contracts.engine import StepReport
from pipeline.contracts.metrics import Metrics
from pipeline.contracts.stage import Context
from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from stages.batches.feed import BatchStats
from stages.train.report import Reporter
from stages.train.step import StepMeter, StepResult

LIMIT = 1.01
CALLS = 1000
"""Steps whose numbers are timed without a training."""


@click.command()
@click.option("--rounds", default=6, show_default=True, help="Pairs of runs.")
@click.option("--steps", default=60, show_default=True, help="Steps of a run.")
@click.option("--batch", default=8, show_default=True, help="Samples of a step.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write everything here.")
def main(rounds: int, steps: int, batch: int, json_file: Path | None) -> None:
    """Measure the pairs, print each and the conclusion."""
    pairs = []
    click.echo(
        "| pair | quiet s/step | watched s/step | ratio | display CPU | trackers' CPU |\n"
        "|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        seconds = metrics_seconds(folder)
        (folder / WORDS).write_text(TEXT, "utf-8")
        for number in range(rounds):
            pair = {
                name: measure(folder / f"{number}-{name}", watched=name == "watched", steps=steps,
                              batch=batch)
                for name in sorted(("quiet", "watched"), reverse=bool(number % 2))
            }  # fmt: skip
            show(number + 1, **pair)
            pairs.append(pair)
    if json_file:
        rows = [{name: asdict(run) for name, run in pair.items()} for pair in pairs]
        raw.write(json_file, "watching", rows)
    click.echo(f"\na step's numbers take rank 0 {1000 * seconds:.2f} ms, in both")
    if not conclude(pairs):
        sys.exit(1)


def metrics_seconds(folder: Path) -> float:
    """Return what rank 0 spends on a step's numbers: measuring, the record, and the line."""
    cpu = torch.device("cpu")
    engine: Any = SimpleNamespace(
        data_axis=SimpleNamespace(count=1), device=cpu, total=lambda values: values
    )
    log = logging.Logger("benchmark")
    log.addHandler(logging.FileHandler(folder / "rank.log"))
    dist, progress = DistContext(device=cpu), Progress()
    metrics = Metrics(folder / "metrics.jsonl")
    ctx = Context(
        run_dir=folder, seed=0, dist=dist, log=log, metrics=metrics, on_exit=lambda call: None
    )
    meter = StepMeter(engine, dist, progress)
    reporter = Reporter(ctx, log_every=1, total_steps=lambda progress: CALLS)
    report = StepReport(grad_norm=1.0, applied=True)
    loss, stats = torch.tensor(2.0), BatchStats()
    began = time.perf_counter()
    for step in range(1, CALLS + 1):
        sums = meter.start_reduction(loss, stats)
        result = StepResult(report=report, rates={"lr": 1e-4}, stats=stats, sums=sums)
        taken = meter.launched_step(result, progress, progress)
        reporter.on_step(step, progress, meter.record(taken))
    return (time.perf_counter() - began) / CALLS


def show(number: int, quiet: Run, watched: Run) -> None:
    """Print one line of the table."""
    click.echo(
        f"| {number} | {quiet.mean:.4f} | {watched.mean:.4f} | {watched.mean / quiet.mean:.3f} "
        f"| {(watched.launcher_cpu - quiet.launcher_cpu) / quiet.mean:.2%} "
        f"| {watched.trackers_cpu / quiet.mean:.2%} |"
    )


def conclude(pairs: Sequence[Mapping[str, Run]]) -> bool:
    """Print the pooled ratio and the median of the pairs; return whether one is within LIMIT."""
    sums = {
        name: statistics.fmean(seconds for pair in pairs for seconds in pair[name].steps)
        for name in ("quiet", "watched")
    }
    pooled = sums["watched"] / sums["quiet"]
    median = statistics.median(pair["watched"].mean / pair["quiet"].mean for pair in pairs)
    click.echo(f"\nwatched / quiet: {pooled:.3f} of all steps, {median:.3f} in the median pair")
    return min(pooled, median) <= LIMIT


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()

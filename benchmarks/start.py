"""Measure how long `pipe run` takes to its first step, beside a bare script of the same training.

    python benchmarks/start.py [--strategies ddp,zero3] [--rounds N] [--launcher torchrun]
                               [--json FILE]

A round is one start of each, in turns; see docs/dev/results.md. Exits 1 when the median of a
strategy's ratios is above 1.1.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import raw
from overhead_job import STRATEGIES
from start_run import Start, bare, ours, prepare
from tables import Rounds, listed, markdown, median, ratio

LIMIT = 1.1
"""Largest accepted median of the ratios of our seconds to the script's."""
HEAD = ("strategy", "ours s", "script s", "ratio", "ours CPU s", "script CPU s", "CPU ratio")


@click.command()
@click.option("--strategies", default=",".join(STRATEGIES), show_default=True)
@click.option("--procs", default=2, show_default=True, help="Processes of each training.")
@click.option("--rounds", default=5, show_default=True, help="Pairs of starts that count.")
@click.option("--launcher", type=click.Choice(["hand", "torchrun"]), default="hand",
              show_default=True, help="Who starts the script's processes.")  # fmt: skip
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write everything here.")
def main(strategies: str, procs: int, rounds: int, launcher: str, json_file: Path | None) -> None:
    """Measure each strategy, print a Markdown table and a conclusion."""
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(folder)
        for strategy in strategies.split(","):
            found[strategy] = pairs(folder, strategy, procs, rounds, launcher)
    click.echo(markdown(HEAD, [row(name, *sides) for name, sides in found.items()]))
    if json_file:
        raw.write(json_file, "start", [figures(name, *sides) for name, sides in found.items()])
    over = [name for name, sides in found.items() if seconds_ratio(*sides) > LIMIT]
    click.echo(f"\nmore than {LIMIT} of the script: {', '.join(over) or 'none'}")
    sys.exit(1 if over else 0)


def pairs(
    folder: Path, strategy: str, procs: int, rounds: int, launcher: str
) -> tuple[list[Start], list[Start]]:
    """Return our starts and the script's, after a first pair that fills caches."""
    mine, theirs = [], []
    for number in range(rounds + 1):
        run = folder / f"{strategy}-{number}"
        turns = [
            lambda run=run: mine.append(ours(folder, strategy, procs, run)),
            lambda: theirs.append(bare(folder, strategy, procs, launcher)),
        ]
        for start in turns if number % 2 else reversed(turns):
            start()
        click.echo(
            f"{strategy} {number}: {mine[-1].seconds:.2f} s, script {theirs[-1].seconds:.2f} s; "
            f"CPU {mine[-1].cpu:.2f} s, script {theirs[-1].cpu:.2f} s",
            err=True,
        )
    return mine[1:], theirs[1:]


def row(strategy: str, mine: list[Start], theirs: list[Start]) -> list[str]:
    """Return a row of the table: medians, and every round."""
    cells = [strategy]
    for what in ("seconds", "cpu"):
        one, other = numbered(mine, what), numbered(theirs, what)
        each = {number: one[number] / other[number] for number in one}
        cells += [listed(one), listed(other), listed(each)]
    return cells


def figures(strategy: str, mine: list[Start], theirs: list[Start]) -> dict[str, Any]:
    """Return a row of the JSON file: median seconds, and each round's ratios."""
    found: dict[str, Any] = {"strategy": strategy}
    found |= {
        name: median(numbered(starts, "seconds"))
        for name, starts in (("ours", mine), ("script", theirs))
    }
    for what in ("seconds", "cpu"):
        each = zip(numbered(mine, what).values(), numbered(theirs, what).values(), strict=True)
        found[f"{what}_ratios"] = [one / other for one, other in each]
    found["starts"] = [[asdict(one) for one in side] for side in (mine, theirs)]
    return found


def seconds_ratio(mine: list[Start], theirs: list[Start]) -> float:
    """Return the median over rounds of the ratio within a round."""
    return ratio(numbered(mine, "seconds"), numbered(theirs, "seconds"))


def numbered(starts: list[Start], what: str) -> Rounds:
    """Return one of the measured values by its round's number."""
    return {number: getattr(start, what) for number, start in enumerate(starts)}


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()

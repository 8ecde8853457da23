"""Compare `pipe plan`'s memory with a trace, and a trace with real tensors.

    python benchmarks/memory.py [--drawn 40] [--seed 0] [--only profiles|tensors] [--json FILE]

Prints two tables of a training step's peak on one rank: profiles (`pipe plan`) next to a trace, the
engine itself on tensors without values, for well-known models and random ones; and the trace next
to a run of the same engine on real tensors on the CPU, for small models. Exits 1 when an error is
larger than 5 % or 0.5 %.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click
import raw
from memories import DRAWN
from memories.cases import SMALL, WELL_KNOWN, Case, drawn
from memories.compare import Pair, profile_and_trace, summary, trace_and_tensors
from tables import markdown, mib

PROFILES, TENSORS = 0.05, 0.005
TABLES = ("profiles", "tensors")


@click.command()
@click.option("--drawn", "count", default=40, help="Random models.")
@click.option("--seed", default=0, help="Of their drawing.")
@click.option("--only", type=click.Choice(TABLES), help="One of the tables.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write everything here.")
def main(count: int, seed: int, only: str | None, json_file: Path | None) -> None:
    """Compare, and print the tables."""
    tables = (only,) if only else TABLES
    worst, rows = [], []
    if "profiles" in tables:
        pairs = _pairs([*WELL_KNOWN, *drawn(count, seed)], profile_and_trace)
        worst.append(_tell(("profile", "trace"), pairs) > PROFILES)
        rows += [_row("profiles", pair) for pair in pairs]
    if "tensors" in tables:
        pairs = _pairs(SMALL, trace_and_tensors)
        worst.append(_tell(("trace", "real tensors"), pairs) > TENSORS)
        rows += [_row("tensors", pair) for pair in pairs]
    if json_file:
        errors = [abs(one["error"]) for one in rows if one["case"].startswith(DRAWN)]
        random = {"figures": len(errors), "largest": max(errors, default=0.0)}
        raw.write(json_file, "memory", rows, random=random)
    sys.exit(any(worst))


def _pairs(cases: Iterable[Case], compare: Callable[[Case], Pair]) -> list[Pair]:
    pairs = []
    for case in cases:
        click.echo(f"{case.name} ...", err=True)
        pairs.append(compare(case))
    return pairs


def _row(table: str, pair: Pair) -> dict[str, Any]:
    return {
        "table": table, "case": pair.case.name, "strategy": f"{pair.case.wrap} x {pair.case.ranks}",
        "told": pair.told, "reference": pair.reference, "error": pair.error,
    }  # fmt: skip


def _tell(names: tuple[str, str], pairs: Sequence[Pair]) -> float:
    """Print a table; return the largest error."""
    rows = [
        [
            pair.case.name,
            f"{pair.case.wrap} x {pair.case.ranks}",
            mib(pair.told),
            mib(pair.reference),
            f"{pair.error:+.3%}",
        ]
        for pair in pairs
    ]
    click.echo(markdown(["", "strategy", *(f"{name}, MiB" for name in names), "error"], rows))
    middle, most = summary(pairs)
    click.echo(f"\nerror of {len(pairs)}: median {middle:.3%}, at most {most:.3%}\n")
    return most


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()

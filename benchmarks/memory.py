"""Compare what `pipe plan` says of memory with a trace, and a trace with real tensors.

    python benchmarks/memory.py [--drawn 12] [--seed 0] [--only profiles|tensors]

Prints two tables of a training step's peak on one rank: profiles (`pipe plan`) beside the
trace (`pipe plan --trace`), for well-known models and random ones; and the trace beside a run of
the same engine on real tensors on the CPU, for small models. Exits 1 when an error is larger than
3 % or 0.5 %.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

import click
from memories.cases import SMALL, WELL_KNOWN, Case, drawn
from memories.compare import Pair, profile_and_trace, summary, trace_and_tensors
from tables import markdown, mib

PROFILES, TENSORS = 0.03, 0.005


@click.command()
@click.option("--drawn", "count", default=12, help="Random models.")
@click.option("--seed", default=0, help="Of their drawing.")
@click.option("--only", type=click.Choice(["profiles", "tensors"]), help="One of the two tables.")
def main(count: int, seed: int, only: str | None) -> None:
    """Compare, and print."""
    worst = []
    if only != "tensors":
        cases = [*WELL_KNOWN, *drawn(count, seed)]
        pairs = _pairs(cases, profile_and_trace)
        _tell(("profile", "trace"), pairs)
        worst.append(summary(pairs)[1] > PROFILES)
    if only != "profiles":
        pairs = _pairs(SMALL, trace_and_tensors)
        _tell(("trace", "real tensors"), pairs)
        worst.append(summary(pairs)[1] > TENSORS)
    sys.exit(any(worst))


def _pairs(cases: Iterable[Case], compare: Callable[[Case], Pair]) -> list[Pair]:
    pairs = []
    for case in cases:
        click.echo(f"{case.name} ...", err=True)
        pairs.append(compare(case))
    return pairs


def _tell(names: tuple[str, str], pairs: Sequence[Pair]) -> None:
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


if __name__ == "__main__":
    main()

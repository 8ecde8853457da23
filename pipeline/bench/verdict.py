"""What a benchmark's numbers come to, in words. Nothing is said that does not follow from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.bench.results import SPREAD_STEPS, Row, Speed, distinguishable

SLOW_DATA = 0.05
"""Share of a step that is waited for data from which on that is the bottleneck."""
MUCH_COMMUNICATION = 0.30
"""Share of a step that is communication alone from which on that is the bottleneck."""


def verdict(rows: Sequence[Row]) -> list[str]:
    """Sentences, one a line; of rows that have their efficiency."""
    ran = [row for row in rows if row.measured is not None]
    if not ran:
        return ["nothing ran to its end"]
    return [_fastest(ran), *_scaling(ran), _bottleneck(_best(ran)), *_failed(rows)]


def _best(ran: Sequence[Row]) -> Row:
    return max(ran, key=lambda row: _speed(row).median)


def _speed(row: Row) -> Speed:
    assert row.speed is not None
    return row.speed


def _fastest(ran: Sequence[Row]) -> str:
    best = _best(ran)
    speed = _speed(best)
    text = f"fastest that fits: {best.label}, {speed.median:,.0f} tokens/s"
    if len(ran) == 1:
        return text
    others = {row: distinguishable(_speed(row), speed) for row in ran if row is not best}
    like = [row.label for row, is_apart in others.items() if is_apart is False]
    if like:
        text += f"; indistinguishable from it within the steps' spread: {', '.join(like)}"
    if None in others.values():
        text += f"; whether others are as fast takes {SPREAD_STEPS} steps to tell"
    return text


def _scaling(ran: Sequence[Row]) -> Iterator[str]:
    """Of each strategy, from its fewest processes to its most."""
    told = False
    for strategy in dict.fromkeys(row.strategy for row in ran):
        mine = sorted((row for row in ran if row.strategy == strategy), key=lambda row: row.procs)
        first, last = mine[0], mine[-1]
        if first.procs == last.procs or last.efficiency is None:
            continue
        told = True
        times = last.procs / first.procs
        spreads = [_speed(row).spread for row in (first, last)]
        alike = distinguishable(_speed(first), _speed(last)) is False
        yield (
            f"{strategy}, from {first.procs} to {last.procs} processes: "
            f"{last.efficiency * times:.2f} times as fast"
            f"{', indistinguishable from no gain' if alike else ''}; "
            f"{last.efficiency:.0%} of the ideal {times:g}{_unsure(spreads, last.efficiency)}"
        )
    if not told:
        yield "scaling: not told, as no strategy ran on two numbers of processes"


def _unsure(spreads: Sequence[float | None], efficiency: float) -> str:
    known = [spread for spread in spreads if spread is not None]
    return f" (+- {sum(known) * efficiency:.0%})" if len(known) == len(spreads) else ""


def _bottleneck(row: Row) -> str:
    m = row.measured
    assert m is not None
    found = []
    if m.data_wait_share >= SLOW_DATA:
        found.append(f"data, which {m.data_wait_share:.0%} of the step is waited for")
    if m.communication_share is not None and m.communication_share >= MUCH_COMMUNICATION:
        found.append(f"communication, {m.communication_share:.0%} of the step")
    if found:
        return f"bottleneck of {row.label}: {' and '.join(found)}"
    if m.communication_share is None:
        return f"bottleneck of {row.label}: not data; communication could not be measured"
    return (
        f"bottleneck of {row.label}: compute (data {m.data_wait_share:.0%}, "
        f"communication {m.communication_share:.0%} of the step)"
    )


def _failed(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row.measured is None:
            yield f"did not run: {row.label}: {row.error}"

"""What a benchmark's numbers come to, in words. Nothing is said that does not follow from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.bench.results import SPREAD_STEPS, Memory, Row, Speed, distinguishable
from pipeline.utils.optional import optional

NONE = "-"
HEADS = (
    "strategy", "procs", "tokens/s", "+-", "s/step", "efficiency", "memory/rank", "predicted",
    "ratio", "data wait", "communication", "first step", "checkpoint",
)  # fmt: skip
GIB = 1 << 30


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines; a run without numbers has its error instead."""
    cells = {id(row): _cells(row) for row in rows}
    whole = [HEADS, *(each for each in cells.values() if len(each) == len(HEADS))]
    widths = [max(len(line[column]) for line in whole) for column in range(len(HEADS))]
    widths[0] = max(len(HEADS[0]), *(len(row.strategy) for row in rows))
    yield _line(HEADS, widths)
    for row in rows:
        line = _line(cells[id(row)], widths)
        yield f"{line}  {row.error}" if row.measured is None else line


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        text.ljust(width) if column == 0 else text.rjust(width)
        for column, (text, width) in enumerate(zip(cells, widths, strict=False))
    )
    return "  ".join([first, *rest]).rstrip()


def _cells(row: Row) -> tuple[str, ...]:
    m = row.measured
    if m is None:
        return row.strategy, str(row.procs)
    speed = m.tokens_per_second
    return (
        row.strategy,
        str(row.procs),
        f"{speed.median:,.0f}",
        _share(speed.spread),
        f"{m.step_seconds.median:.3g}",
        _share(row.efficiency),
        _size(m.memory.measured),
        _size(m.memory.predicted),
        _ratio(m.memory),
        f"{m.data_wait_share:.1%}",
        NONE if m.communication_share is None else f"{m.communication_share:.1%}",
        f"{m.first_step_seconds:.1f} s",
        NONE if m.checkpoint_seconds is None else f"{m.checkpoint_seconds:.2f} s",
    )


def _share(value: float | None) -> str:
    return NONE if value is None else f"{value:.0%}"


def _size(value: int | None) -> str:
    return NONE if value is None else f"{value / GIB:.2f} GiB"


def _ratio(memory: Memory) -> str:
    return NONE if memory.ratio is None else f"{memory.ratio:.2f}"


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


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write one self-contained SVG. Raises StageError without matplotlib."""
    with optional("the plot needs matplotlib", hint="pip install 'pipetrain[report]'"):
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    with matplotlib.rc_context({"svg.hashsalt": "pipe"}):
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot(title=title, xlabel="processes", ylabel="tokens per second")
        ran = [row for row in rows if row.speed is not None]
        for strategy in dict.fromkeys(row.strategy for row in ran):
            mine = sorted((r for r in ran if r.strategy == strategy), key=lambda r: r.procs)
            speeds = [row.speed for row in mine if row.speed is not None]
            procs = [row.procs for row in mine]
            medians = [speed.median for speed in speeds]
            below = [speed.median - speed.low for speed in speeds]
            above = [speed.high - speed.median for speed in speeds]
            bars = axes.errorbar(
                procs, medians, yerr=[below, above], marker="o", capsize=3, label=strategy
            )
            if len(procs) > 1:
                ideal = [medians[0] * count / procs[0] for count in procs]
                axes.plot(procs, ideal, linestyle=":", color=bars[0].get_color())
        axes.plot([], [], linestyle=":", color="grey", label="ideal")
        axes.set_xticks(sorted({row.procs for row in ran}))
        axes.set_ylim(bottom=0)
        axes.legend()
        figure.savefig(path, format="svg", metadata={"Date": None})

"""A benchmark in columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.bench.results import Memory, Row

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

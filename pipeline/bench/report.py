"""What a benchmark says: a table and a verdict on screen, or JSON, and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from pipeline.bench import plot, record
from pipeline.bench.results import Row
from pipeline.bench.session import Outcome, Session
from pipeline.bench.table import table
from pipeline.bench.verdict import verdict
from pipeline.errors import StageError, in_words, system_errors_as

PLOT = "bench.svg"
MEMORY = {
    "device": "most that torch held on one GPU (max_memory_allocated)",
    "host": "most that was resident of a process beyond what was before the model (VmHWM - VmRSS),"
    " which is more than the tensors that are predicted, so there is no ratio",
}
"""`Memory.kind` in words."""


def keep(session: Session, rows: Sequence[Row]) -> None:
    """Save what there is by now. Where that fails, the rows are still here, and go on."""
    try:
        record.save(session, record.as_json(session, rows))
    except OSError as error:
        click.echo(f"  {record.FILE} cannot be written: {in_words(error)}", err=True)


def report(session: Session, outcome: Outcome, *, as_json: bool) -> None:
    """Print the table and the verdict, or the JSON, and write the files. Raises StageError for
    files that cannot be written, when all has been told."""
    rows = outcome.rows
    if not as_json:
        for line in _lines(session, outcome):
            click.echo(line)
    text = record.as_json(session, rows, _plot(session, rows))
    if as_json:
        click.echo(text)
    with system_errors_as(StageError):
        record.save(session, text)
    if not as_json:
        click.echo(f"{session.folder / record.FILE}")


def _lines(session: Session, outcome: Outcome) -> Iterator[str]:
    rows, missing = outcome.rows, session.missing(outcome.rows)
    yield from ("", *_conditions(session, rows), "", *table(rows), "", *verdict(rows))
    if outcome.stopped and missing:
        yield f"stopped by {outcome.stopped.name} before the end of {', '.join(missing)}"
    yield ""


def _plot(session: Session, rows: Sequence[Row]) -> str | None:
    """The file; None without one, which is told."""
    if all(row.measured is None for row in rows):
        return None
    try:
        with system_errors_as(StageError):
            plot.draw(rows, session.folder / PLOT, session.plan.recipe.name)
    except StageError as error:
        click.echo(f"no {PLOT}: {error}", err=True)
        return None
    return PLOT


def _conditions(session: Session, rows: Sequence[Row]) -> Iterator[str]:
    """What the numbers are of."""
    length, ran = session.length, [row.measured for row in rows if row.measured]
    batches = sorted({m.samples_per_step for m in ran})
    samples = " to ".join(str(each) for each in dict.fromkeys([*batches[:1], *batches[-1:]]))
    how = "samples per process stay" if length.weak else "the global batch stays"
    yield f"{session.plan.recipe.name} on {session.plan.view.device}: median of {length.steps} " + (
        f"step{'s' * (length.steps != 1)} after {length.warmup}; {how}"
        + (f" ({samples} samples a step)" if ran else "")
    )
    bases = {row.efficiency_base for row in rows if row.efficiency_base}
    if bases:
        yield f"efficiency: tokens/s of a process, relative to {_base(bases)}"
    if ran:
        kinds = {m.memory.kind for m in ran}
        yield "memory: " + " / ".join(MEMORY[kind] for kind in sorted(kinds))
    for row in rows:
        left_out = row.measured.steps_left_out if row.measured else 0
        if left_out:
            yield f"{row.label}: {left_out} of the steps are left out, as no update came of them"


def _base(bases: set[int]) -> str:
    count = " or ".join(str(base) for base in sorted(bases))
    return f"the strategy's own run on {count} process{'es' * (bases != {1})}"

"""What a benchmark says: a table and a verdict on screen, or JSON, and a picture."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Sequence
from typing import Any

import click

from pipeline.bench import render
from pipeline.bench.render import table, verdict
from pipeline.bench.results import Row
from pipeline.bench.session import Benchmark, Outcome
from pipeline.errors import StageError, in_words, system_errors_as
from pipeline.utils.files import replace_text
from pipeline.utils.versions import versions

PLOT = "bench.svg"
MEMORY = {
    "device": "most that torch held on one GPU (max_memory_allocated)",
    "host": "most that was resident of a process beyond what was before the model (VmHWM - VmRSS),"
    " which is more than the tensors that are predicted, so there is no ratio",
}
"""`Memory.kind` in words."""


def keep(session: Benchmark, rows: Sequence[Row]) -> None:
    """Save what there is by now. Where that fails, the rows are still here, and go on."""
    try:
        save(session, as_json(session, rows))
    except OSError as error:
        click.echo(f"  {FILE} cannot be written: {in_words(error)}", err=True)


def report(session: Benchmark, outcome: Outcome, *, json_only: bool) -> None:
    """Print the table and the verdict, or the JSON, and write the files. Raises StageError for
    files that cannot be written, when all has been told."""
    rows = outcome.rows
    if not json_only:
        for line in _lines(session, outcome):
            click.echo(line)
    text = as_json(session, rows, _plot(session, rows))
    if json_only:
        click.echo(text)
    with system_errors_as(StageError):
        save(session, text)
    if not json_only:
        click.echo(f"{session.folder / FILE}")


def _lines(session: Benchmark, outcome: Outcome) -> Iterator[str]:
    rows, missing = outcome.rows, session.missing(outcome.rows)
    yield from ("", *_conditions(session, rows), "", *table(rows), "", *verdict(rows))
    if outcome.stopped and missing:
        yield f"stopped by {outcome.stopped.name} before the end of {', '.join(missing)}"
    yield ""


def _plot(session: Benchmark, rows: Sequence[Row]) -> str | None:
    """The file; None without one, which is told."""
    if all(row.measured is None for row in rows):
        return None
    try:
        with system_errors_as(StageError):
            render.draw(rows, session.folder / PLOT, session.plan.recipe.name)
    except StageError as error:
        click.echo(f"no {PLOT}: {error}", err=True)
        return None
    return PLOT


def _conditions(session: Benchmark, rows: Sequence[Row]) -> Iterator[str]:
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


SCHEMA_VERSION = 1
FILE = "bench.json"
PLAIN = (
    "steps_left_out", "tokens_per_step", "samples_per_step", "data_wait_share",
    "communication_share", "first_step_seconds", "checkpoint_seconds", "checkpoint_stall_seconds",
)  # fmt: skip
"""Names of `Measured` that JSON has too."""


def as_json(session: Benchmark, rows: Sequence[Row], plot: str | None = None) -> str:
    """The rows that there are; `plot` is the picture's file, if it is drawn."""
    content = {
        **_head(session),
        "rows": [_row(row) for row in rows],
        "missing": session.missing(rows),
        "verdict": verdict(rows),
        "plot": plot,
    }
    return json.dumps(content, indent=1, allow_nan=False)


def save(session: Benchmark, text: str) -> None:
    """Put it in place whole, or leave what is there. Raises OSError."""
    replace_text(session.folder / FILE, text + "\n")


def _head(session: Benchmark) -> dict[str, Any]:
    plan, length = session.plan, session.length
    return {
        "schema_version": SCHEMA_VERSION,
        "recipe": plan.recipe.name,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": plan.view.device,
        "scaling": "weak" if length.weak else "strong",
        "steps": length.steps,
        "warmup": length.warmup,
        "threads": session.threads,
        "packages": versions(),
        "folder": str(session.folder),
    }


def _row(row: Row) -> dict[str, Any]:
    """The same keys for one that failed, whose numbers are null."""
    m = row.measured
    return {
        "strategy": row.strategy, "use": row.use, "procs": row.procs,
        "error": row.error or None,
        "tokens_per_second": m and vars(m.tokens_per_second),
        "step_seconds": m and vars(m.step_seconds),
        "efficiency": row.efficiency, "efficiency_base": row.efficiency_base,
        "memory": m and {**vars(m.memory), "ratio": m.memory.ratio},
        **{name: m and getattr(m, name) for name in PLAIN},
    }  # fmt: skip

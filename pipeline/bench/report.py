"""What a benchmark leaves: a table and a verdict on screen, `bench.json`, `bench.svg`."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Sequence
from typing import Any

import click

from pipeline import rundir
from pipeline.bench import plot
from pipeline.bench.results import Row
from pipeline.bench.session import Session
from pipeline.bench.table import table
from pipeline.bench.trials import threads
from pipeline.bench.verdict import verdict
from pipeline.errors import StageError
from pipeline.files import replace_text

SCHEMA_VERSION = 1
JSON = "bench.json"
PLOT = "bench.svg"
MEMORY = {
    "device": "most that torch held on one GPU (max_memory_allocated)",
    "host": "most that a process held beyond what it held before the model (VmHWM - VmRSS)",
}
"""`Memory.kind` in words."""


def report(session: Session, rows: Sequence[Row], *, as_json: bool) -> None:
    """Write the files, and print the table and the verdict, or the JSON."""
    said = verdict(rows)
    content = {**_head(session), "rows": [row.dump() for row in rows], "verdict": said}
    content["plot"] = _plot(session, rows)
    text = json.dumps(content, indent=1, allow_nan=False)
    replace_text(session.folder / JSON, text + "\n")
    if as_json:
        click.echo(text)
        return
    for line in ("", *_conditions(session, rows), "", *table(rows), "", *said, ""):
        click.echo(line)
    click.echo(f"{session.folder / JSON}")


def _head(session: Session) -> dict[str, Any]:
    plan, length = session.plan, session.length
    return {
        "schema_version": SCHEMA_VERSION,
        "recipe": plan.recipe.name,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": plan.view.device,
        "scaling": "weak" if length.weak else "strong",
        "steps": length.steps,
        "warmup": length.warmup,
        "threads": threads(plan, session.most),
        "packages": rundir.versions(),
        "folder": str(session.folder),
    }


def _plot(session: Session, rows: Sequence[Row]) -> str | None:
    """The file; None without one, which is told."""
    if all(row.measured is None for row in rows):
        return None
    try:
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
    yield from dict.fromkeys(f"{row.label}: {row.note}" for row in rows if row.note)


def _base(bases: set[int]) -> str:
    count = " or ".join(str(base) for base in sorted(bases))
    return f"the strategy's own run on {count} process{'es' * (bases != {1})}"

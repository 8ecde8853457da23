"""Report a benchmark: conditions, table and verdict on screen, JSON and a picture as files."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from signal import Signals
from typing import Any

import click

from pipeline.bench.session import SPREAD_STEPS, Benchmark, Row, RunMeasurement, Speed
from pipeline.errors import StageError, in_words, system_errors_as
from pipeline.hardware.gpus import GIB
from pipeline.utils.files import replace_text
from pipeline.utils.packages import optional, versions
from pipeline.utils.text import align, plural

SCHEMA_VERSION = 1
FILE = "bench.json"
PLOT = "bench.svg"
MEMORY = {
    "device": "peak of torch's tensors on one GPU (max_memory_allocated)",
    "host": "peak resident memory of a process beyond that before the model (VmHWM - VmRSS), "
    "more than the predicted tensors, so without a ratio",
}
"""Description of `Memory.kind`."""
COLUMNS: Mapping[str, tuple[str, Callable[[Row, RunMeasurement], float | None]]] = {
    "tokens/s": ("{:,.0f}", lambda row, m: m.tokens_per_second.median),
    "+-": ("{:.0%}", lambda row, m: m.tokens_per_second.spread),
    "s/step": ("{:.3g}", lambda row, m: m.step_seconds.median),
    "efficiency": ("{:.0%}", lambda row, m: row.efficiency),
    "memory/rank": ("{:.2f} GiB", lambda row, m: m.memory.measured and m.memory.measured / GIB),
    "predicted": ("{:.2f} GiB", lambda row, m: m.memory.predicted and m.memory.predicted / GIB),
    "ratio": ("{:.2f}", lambda row, m: m.memory.ratio),
    "data wait": ("{:.1%}", lambda row, m: m.data_wait_share),
    "communication": ("{:.1%}", lambda row, m: m.communication_share),
    "first step": ("{:.1f} s", lambda row, m: m.first_step_seconds),
    "checkpoint": ("{:.2f} s", lambda row, m: m.checkpoint_seconds),
}
"""Column of the table -> format and value; None is not known."""
NO_SCALING = "scaling: unknown, as no strategy ran on two numbers of processes"
SLOW_DATA, MUCH_COMMUNICATION = 0.05, 0.30
"""Shares of a step from which waiting for data, or only communicating, is a bottleneck."""


def keep(session: Benchmark, rows: Sequence[Row]) -> None:
    """Save the rows measured so far; a failure to write is printed."""
    try:
        replace_text(session.folder / FILE, as_json(session, rows) + "\n")
    except OSError as error:
        click.echo(f"  {FILE} cannot be written: {in_words(error)}", err=True)


def report(
    session: Benchmark, rows: Sequence[Row], stopped: Signals | None, *, json_only: bool
) -> None:
    """Print the table and the verdict, or the JSON, then write the files. Raises StageError."""
    if not json_only:
        lines = ["", *_conditions(session, rows), "", *table(rows), "", *verdict(rows)]
        if stopped and len(rows) < len(session.rows):
            missing = ", ".join(row.label for row in session.rows[len(rows) :])
            lines.append(f"stopped by {stopped.name} before the end of {missing}")
        click.echo("\n".join([*lines, ""]))
    plot = None
    if any(row.measured for row in rows):
        try:
            with system_errors_as(StageError):
                draw(rows, session.folder / PLOT, session.plan.recipe.name)
            plot = PLOT
        except StageError as error:
            click.echo(f"no {PLOT}: {error}", err=True)
    text = as_json(session, rows, plot)
    if json_only:
        click.echo(text)
    with system_errors_as(StageError):
        replace_text(session.folder / FILE, text + "\n")
    if not json_only:
        click.echo(f"{session.folder / FILE}")


def _conditions(session: Benchmark, rows: Sequence[Row]) -> Iterator[str]:
    """Lines on what was run and how it is measured."""
    length, ran = session.length, [row.measured for row in rows if row.measured]
    batches = sorted({m.samples_per_step for m in ran})
    samples = " to ".join(map(str, dict.fromkeys([*batches[:1], *batches[-1:]])))
    how = "samples per process stay" if length.weak else "the global batch stays"
    yield (
        f"{session.plan.recipe.name} on {session.plan.view.device}: median of "
        f"{plural(length.steps, 'step')} after {length.warmup}; {how}"
        f"{f' ({samples} samples a step)' if ran else ''}"
    )
    bases = sorted({row.efficiency_base for row in rows if row.efficiency_base})
    if bases:
        runs = " or ".join(map(str, [*bases[:-1], plural(bases[-1], "process")]))
        yield f"efficiency: tokens/s of a process, relative to the strategy's own run on {runs}"
    if ran:
        kinds = {m.memory.kind for m in ran}
        yield "memory: " + " / ".join(MEMORY[kind] for kind in sorted(kinds))
    for row in rows:
        if row.measured and row.measured.steps_left_out:
            skipped = plural(row.measured.steps_left_out, "step")
            yield f"{row.label}: {skipped} without an update left out"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of the table; a run without numbers has its error instead."""
    cells = [["strategy", "procs", *COLUMNS]]
    for row in rows:
        m = row.measured
        values = [(form, value(row, m)) for form, value in COLUMNS.values()] if m else []
        known = ["-" if value is None else form.format(value) for form, value in values]
        cells.append([row.strategy, str(row.procs), *known])
    head, *lines = align(cells)
    yield head
    for row, line in zip(rows, lines, strict=True):
        yield f"{line}  {row.error}" if row.measured is None else line


def verdict(rows: Sequence[Row]) -> list[str]:
    """Sentences that follow from rows with their efficiency, one a line."""
    ran = {row: row.measured for row in rows if row.measured is not None}
    failed = [f"did not run: {row.label}: {row.error}" for row in rows if row not in ran]
    if not ran:
        return ["nothing ran to its end"]
    speeds = {row: m.tokens_per_second for row, m in ran.items()}
    best = max(speeds, key=lambda row: speeds[row].median)
    text = f"fastest that fits: {best.label}, {speeds[best].median:,.0f} tokens/s"
    apart = {row: distinguishable(speeds[row], speeds[best]) for row in speeds if row is not best}
    if like := [row.label for row, is_apart in apart.items() if is_apart is False]:
        text += f"; indistinguishable from it within the steps' spread: {', '.join(like)}"
    if None in apart.values():
        text += f"; {SPREAD_STEPS} steps would show whether others are as fast"
    scaling = list(_scaling(speeds)) or [NO_SCALING]
    m = ran[best]
    data, share, slow = f"{m.data_wait_share:.0%}", m.communication_share, list[str]()
    communication = "-" if share is None else f"{share:.0%}"
    if m.data_wait_share >= SLOW_DATA:
        slow.append(f"waiting for data, {data} of the step")
    if (share or 0) >= MUCH_COMMUNICATION:
        slow.append(f"communication, {communication} of the step")
    if not slow and share is None:
        slow = ["not data; communication could not be measured"]
    compute = f"compute (data {data}, communication {communication} of the step)"
    bottleneck = f"bottleneck of {best.label}: {' and '.join(slow) or compute}"
    return [text, *scaling, bottleneck, *failed]


def distinguishable(one: Speed, other: Speed) -> bool | None:
    """Whether two speeds differ by more than the wider of their spreads; None if one has none."""
    if one.spread is None or other.spread is None:
        return None
    widest = max(one.spread * one.median, other.spread * other.median)
    return abs(one.median - other.median) > widest


def _scaling(speeds: Mapping[Row, Speed]) -> Iterator[str]:
    """A sentence for each strategy, from its fewest processes to its most."""
    for strategy in dict.fromkeys(row.strategy for row in speeds):
        mine = sorted((row for row in speeds if row.strategy == strategy), key=lambda r: r.procs)
        first, last = mine[0], mine[-1]
        if first.procs == last.procs or last.efficiency is None:
            continue
        times = last.procs / first.procs
        spreads = [speeds[row].spread for row in (first, last)]
        known = [spread for spread in spreads if spread is not None]
        unsure = f" (+- {sum(known) * last.efficiency:.0%})" if len(known) == 2 else ""
        alike = distinguishable(speeds[first], speeds[last]) is False
        yield (
            f"{strategy}, from {first.procs} to {last.procs} processes: "
            f"{last.efficiency * times:.2f} times as fast"
            f"{', indistinguishable from no gain' if alike else ''}; "
            f"{last.efficiency:.0%} of the ideal {times:g}{unsure}"
        )


def as_json(session: Benchmark, rows: Sequence[Row], plot: str | None = None) -> str:
    """The JSON of the rows so far; `plot` is the picture's file, if it is drawn."""
    plan, length, shown_rows = session.plan, session.length, []
    for row in rows:  # the numbers of a failed run are null
        numbers: dict[str, Any] = dict.fromkeys(field.name for field in fields(RunMeasurement))
        if row.measured:
            numbers = asdict(row.measured)
            numbers["memory"]["ratio"] = row.measured.memory.ratio
        head = {key: value for key, value in vars(row).items() if key != "measured"}
        shown_rows.append({**head, "error": row.error or None, **numbers})
    content = {
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
        "rows": shown_rows,
        "missing": [row.label for row in session.rows[len(rows) :]],
        "verdict": verdict(rows),
        "plot": plot,
    }
    return json.dumps(content, indent=1, allow_nan=False)


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write one self-contained SVG. Raises StageError without matplotlib."""
    with optional("the plot needs matplotlib", hint="pip install 'pipetrain[report]'"):
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    found: dict[str, dict[int, Speed]] = {}
    for row in sorted(rows, key=lambda row: row.procs):
        if row.speed:
            found.setdefault(row.strategy, {})[row.procs] = row.speed
    with matplotlib.rc_context({"svg.hashsalt": "pipe"}):
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot(title=title, xlabel="processes", ylabel="tokens per second")
        for strategy in dict.fromkeys(row.strategy for row in rows if row.speed):
            procs, speeds = list(found[strategy]), found[strategy].values()
            medians = [speed.median for speed in speeds]
            spans = [[s.median - s.low for s in speeds], [s.high - s.median for s in speeds]]
            bars = axes.errorbar(procs, medians, spans, marker="o", capsize=3, label=strategy)
            if len(procs) > 1:
                ideal = [medians[0] * count / procs[0] for count in procs]
                axes.plot(procs, ideal, linestyle=":", color=bars[0].get_color())
        axes.plot([], [], linestyle=":", color="grey", label="ideal")
        axes.set_xticks(sorted({count for speeds in found.values() for count in speeds}))
        axes.set_ylim(bottom=0)
        axes.legend()
        figure.savefig(path, format="svg", metadata={"Date": None})

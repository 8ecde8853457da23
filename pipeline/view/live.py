"""A run as a block of text, as the live display draws it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.execution import rundir
from pipeline.execution.run_state import Training
from pipeline.hardware.telemetry import GpuReading
from pipeline.utils.activities import BYTES
from pipeline.utils.terminal import shown
from pipeline.utils.text import (
    ASCII_BARS,
    BARS,
    count,
    counted,
    duration,
    gib,
    human,
    number,
    percent,
    plural,
    sparkline,
)
from pipeline.view.run import PLANNED, Run, json_in

LABEL = "bright_black"
"""Colour of what is always the same."""
LABEL_WIDTH = len("training")
CURVE_WIDTH = 30
MOST_MEASURED = 6
"""Plugins' numbers that are drawn."""
LONGEST_LABEL = 20
"""Characters of a plugin's name for a number that are drawn."""
GAP = "  "
"""Between two slots."""
Glyphs = Mapping[str, str]
UNICODE: Glyphs = {
    "waiting": "·", "running": "●", "finished": "✓", "failed": "✗", "stopped": "■", "bars": BARS,
    "dot": " · ", "cut": "…",
}  # fmt: skip
"""State of a slot -> its sign, and what else is drawn."""
ASCII: Glyphs = {
    "waiting": ".", "running": "*", "finished": "+", "failed": "x", "stopped": "=",
    "bars": ASCII_BARS, "dot": ", ", "cut": "~",
}  # fmt: skip
COLOURS = {
    "waiting": LABEL, "running": "bold cyan", "finished": "green", "failed": "bold red",
    "stopped": "yellow",
}  # fmt: skip


def drawing(
    run: Run, gpus: Sequence[GpuReading], *, name: str, where: str, width: int,
    marks: Glyphs = UNICODE,
) -> RenderableType:  # fmt: skip
    """Return the run as it is at the moment, `width` columns wide, under its name and the place
    where it runs (`wrap.fsdp, 8 processes, cuda`)."""
    title = Table.grid(expand=True)
    title.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    title.add_column(justify="right", no_wrap=True)
    head = Text(shown(name), style="bold").append(f"  {shown(where)}", style=LABEL)
    title.add_row(head, Text(duration(run.seconds), style=LABEL))
    parts: list[RenderableType] = [Text(), title, _slots(run, marks, width)]
    if doing := run.activity():
        parts.append(_activity(doing, width))
    if run.training.step:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style=LABEL, no_wrap=True, min_width=LABEL_WIDTH)
        table.add_column(overflow="fold")
        for label, value in _rows(run, gpus, marks):
            if value:
                table.add_row(Text(label), Text(value) if isinstance(value, str) else value)
        newest, slot = run.training.step, shown(run.training.slot)
        at, total = newest["step"], newest.get("total_steps")
        progress: RenderableType = Text(f"{slot} step {at}".strip())
        if total:
            amount, left = f"step {at} of {total}", run.seconds_left or None
            progress = _bar(slot or "training", at, total, amount, left, width)
        parts += [progress, table]
    return Group(*parts)


def _slots(run: Run, marks: Glyphs, width: int) -> RenderableType:
    """Return the slots, in as many lines as they take."""
    lines = [Text()]
    for name, state in run.slots.items():
        since = duration(time.time() - state.began) if state.state == "running" else ""
        text = f"{marks[state.state]} {shown(name)} {since}".rstrip()
        slot = Text(text, style=COLOURS[state.state])
        if lines[-1] and lines[-1].cell_len + len(GAP) + slot.cell_len > width:
            lines.append(Text())
        lines[-1].append(GAP if lines[-1] else "").append_text(slot)
    return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)


def _activity(doing: dict[str, Any], width: int) -> RenderableType:
    """Return a bar, or only the amount where the total is not known."""
    name, unit, done = shown(doing["name"]), shown(doing["unit"]), float(doing["done"])
    amount = human if unit == BYTES else lambda value: counted(value, unit)
    seconds, total = float(doing["seconds"]), float(doing["total"] or 0)
    if not total:
        return Text(f"{name}  {amount(done) if done else duration(seconds)}")
    left = seconds * (total - done) / done if done else None
    return _bar(name, done, total, f"{amount(done)} of {amount(total)}", left, width)


def _bar(
    name: str, done: float, total: float, amount: str, left: float | None, width: int
) -> RenderableType:
    bar = ProgressBar(total=total, completed=min(done, total), width=max(10, width // 4),
                      complete_style="cyan", finished_style="green")  # fmt: skip
    line = Table.grid(padding=(0, 2, 0, 0))
    rest = Text("" if left is None else f"{duration(left)} left", style=LABEL)
    line.add_row(Text(name), bar, Text(amount), rest)
    return line


def _rows(run: Run, gpus: Sequence[GpuReading], marks: Glyphs) -> Iterator[tuple[str, Text | str]]:
    """Yield labels and values of the newest training; an empty value is not known."""
    training, dot = run.training, marks["dot"]
    step, newest = training.step, training.newest
    losses = [one["loss"] for one in training.steps if one["loss"] is not None]
    loss = Text(number(step["loss"]), style="bold")
    yield "loss", loss.append(f"  {sparkline(losses, CURVE_WIDTH, marks['bars'])}", style="cyan")
    yield "ended early", shown(training.ended_early)
    yield "held out", dot.join(_held_out(run))
    yield from _measured(training, marks)
    known = {name for name, value in step.items() if value is not None}
    update = [
        f"gradient norm {step['grad_norm']:.3g}" if "grad_norm" in known else "",
        f"learning rate {step['lr']:.3g}" if "lr" in known else "",
        f"{count(step['tokens'])} target tokens" if "tokens" in known else "",
    ]
    yield "step", dot.join(filter(None, update))
    yield "speed", dot.join(_speed(step, run))
    yield "memory", dot.join(_memory(step, run, gpus))
    if gpus:
        readings = (
            ([100 * one.utilisation for one in gpus if one.utilisation is not None], "% busy"),
            ([one.temperature for one in gpus if one.temperature is not None], "°C"),
            ([one.watts for one in gpus if one.watts is not None], "W"),
        )
        ranges = [
            (dict.fromkeys((round(min(values)), round(max(values)))), unit)
            for values, unit in readings if values
        ]  # fmt: skip
        texts = (f"{' to '.join(map(str, ends))} {unit}" for ends, unit in ranges)  # 70 to 71 °C
        yield plural(len(gpus), "GPU"), dot.join(texts)
    for gpu in gpus:
        if gpu.throttled:
            yield "slowed", Text(f"GPU {gpu.index} by {' and '.join(gpu.throttled)}", "yellow")
    if saved := newest.get("checkpoint"):
        yield "saved", f"step {saved['step']}, {duration(time.time() - saved['time'])} ago"


def _held_out(run: Run) -> Iterator[str]:
    """Yield the newest evaluation, and the best and the first where they are others."""
    record = run.training.newest.get("evaluation")
    if record is None:
        return
    step, best = record["step"], record.get("best_step")
    so_far = ", best so far" if best == step else ""
    yield f"{number(record['eval_loss'])} (step {step}{so_far})"
    if best not in (None, step):
        yield f"best {record['best_eval_loss']:.4f} (step {best})"
    first = run.training.first_evaluation
    if run.whole and first["step"] not in (step, best):
        yield f"first {number(first['eval_loss'])} (step {first['step']})"


def _measured(training: Training, marks: Glyphs) -> Iterator[tuple[str, Text]]:
    """Yield plugins' numbers: the newest of each, and its curve."""
    measured = training.measured
    for name, values in list(measured.items())[:MOST_MEASURED]:
        step, value = values[-1]
        when = "" if step == training.step["step"] else f" at step {step}"
        curve = sparkline([value for _, value in values], CURVE_WIDTH, marks["bars"])
        label = shown(name)
        if len(label) > LONGEST_LABEL:
            label = f"{label[: LONGEST_LABEL - 1]}{marks['cut']}"
        yield label, Text(f"{value:.4g}{when}").append(f"  {curve}", style="cyan")
    left = len(measured) - MOST_MEASURED
    if left > 0:
        yield "", Text(f"{left} more measurements are in the report", style=LABEL)


def _speed(step: dict[str, Any], run: Run) -> Iterator[str]:
    """Yield the mean speed and, while there are steps left, the newest step's."""
    speed = run.training.speed
    mean, now = speed.mean("tokens_per_second"), step.get("tokens_per_second")
    if mean is None:
        return
    if now is not None and run.state == "running" and step["step"] != step.get("total_steps"):
        yield f"{count(now)} tokens/s now, {count(mean)} on average"
    else:
        yield f"{count(mean)} tokens/s on average"
    yield f"{speed.seconds / speed.steps:.3g} s/step"
    for name, label in (("mfu", "MFU"), ("data_wait_share", "data wait")):
        share = speed.mean(name)
        if share is not None:
            yield f"{label} {percent(share)}"
    if record := run.training.newest.get("communication"):
        yield f"communication {percent(record['communication_share'])} (step {record['step']})"


def _memory(step: dict[str, Any], run: Run, gpus: Sequence[GpuReading]) -> Iterator[str]:
    peak, host = step.get("peak_memory_bytes"), step.get("peak_host_memory_bytes")
    if peak is not None:
        sizes = [gpu.memory_total_bytes for gpu in gpus if gpu.memory_total_bytes]
        yield f"{gib(peak)}{f' of {gib(min(sizes))}' if sizes else ''} GiB"
        planned = json_in(run.folder / rundir.PLAN, PLANNED).get("needed_bytes")
        if planned is not None:
            yield f"plan {gib(planned)} GiB"
    if host is not None:
        yield f"host {gib(host)} GiB per process"

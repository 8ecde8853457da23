"""A run as a block of text that a terminal draws again and again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    sparkline,
)
from pipeline.view.run import PLANNED, Run, json_in

LABEL = "bright_black"
"""Colour of what is the same all the time."""
LABEL_WIDTH = len("training")
CURVE_WIDTH = 30
MOST_MEASURED = 6
"""Plugins' numbers that are drawn."""
LONGEST_LABEL = 20
"""Characters of a plugin's name for a number that are drawn."""
GAP = "  "
"""Between two slots."""


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Characters for the states of slots, and for curves."""

    waiting: str
    running: str
    finished: str
    failed: str
    stopped: str
    bars: str
    dot: str
    cut: str


UNICODE = Marks(
    waiting="·", running="●", finished="✓", failed="✗", stopped="■", bars=BARS, dot=" · ", cut="…"
)  # fmt: skip
ASCII = Marks(
    waiting=".", running="*", finished="+", failed="x", stopped="=", bars=ASCII_BARS, dot=", ",
    cut="~",
)  # fmt: skip
_COLOURS = {
    "waiting": LABEL, "running": "bold cyan", "finished": "green", "failed": "bold red",
    "stopped": "yellow",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Header:
    """A run's name, and the place where it runs."""

    name: str
    where: str
    """`wrap.fsdp, 8 processes, cuda`."""


def drawing(
    header: Header, run: Run, gpus: Sequence[GpuReading], *, width: int, marks: Marks = UNICODE
) -> RenderableType:
    """Return the run as it is at the moment, `width` columns wide."""
    title = Table.grid(expand=True)
    title.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    title.add_column(justify="right", no_wrap=True)
    name = Text(shown(header.name), style="bold").append(f"  {shown(header.where)}", style=LABEL)
    title.add_row(name, Text(duration(run.seconds), style=LABEL))
    parts: list[RenderableType] = [Text(), title, _chain(run, marks, width)]
    doing = run.activity()
    if doing:
        parts.append(_activity(doing, width))
    if run.training.step:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style=LABEL, no_wrap=True, min_width=LABEL_WIDTH)
        table.add_column(overflow="fold")
        for label, value in _rows(run, gpus, marks):
            table.add_row(label, value)
        parts += [_steps(run, width), table]
    return Group(*parts)


def _chain(run: Run, marks: Marks, width: int) -> RenderableType:
    """Return the slots, in as many lines as they take."""
    lines = [Text()]
    for name, state in run.slots.items():
        words = [getattr(marks, state.state), shown(name)]
        if state.state == "running":
            words.append(duration(time.time() - state.began))
        slot = Text(" ".join(words), style=_COLOURS[state.state])
        if lines[-1] and lines[-1].cell_len + len(GAP) + slot.cell_len > width:
            lines.append(Text())
        lines[-1].append(GAP if lines[-1] else "").append_text(slot)
    return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)


def _activity(doing: dict[str, Any], width: int) -> RenderableType:
    """Return a bar, or only the amount where the whole is not known."""
    name, unit = shown(doing["name"]), shown(doing["unit"])
    done = float(doing["done"])
    amount = human if unit == BYTES else lambda value: counted(value, unit)
    if not doing["total"]:
        return Text(f"{name}  {amount(done) if done else duration(float(doing['seconds']))}")
    total = float(doing["total"])
    left = float(doing["seconds"]) * (total - done) / done if done else None
    return _bar(Text(name), done, total, f"{amount(done)} of {amount(total)}", left, width)


def _steps(run: Run, width: int) -> RenderableType:
    newest, name = run.training.step, shown(run.training.slot)
    step, total = newest["step"], newest.get("total_steps")
    if not total:
        return Text(f"{name} step {step}".strip())
    text, left = f"step {step} of {total}", run.seconds_left or None
    return _bar(Text(name or "training"), step, total, text, left, width)


def _bar(
    name: Text, done: float, total: float, amount: str, left: float | None, width: int
) -> RenderableType:
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_row(
        name,
        ProgressBar(
            total=total,
            completed=min(done, total),
            width=max(10, width // 4),
            complete_style="cyan",
            finished_style="green",
        ),
        Text(amount),
        Text("" if left is None else f"{duration(left)} left", style=LABEL),
    )
    return line


def _rows(
    run: Run, gpus: Sequence[GpuReading], marks: Marks
) -> Iterator[tuple[str, RenderableType]]:
    training, dot = run.training, marks.dot
    step = training.step
    losses = [one["loss"] for one in training.steps if one["loss"] is not None]
    loss = Text(number(step["loss"]), style="bold")
    loss.append(f"  {sparkline(losses, CURVE_WIDTH, marks.bars)}", style="cyan")
    yield "loss", loss
    if training.ended_early:
        yield "ended early", Text(shown(training.ended_early))
    if "evaluation" in training.newest:
        record = training.newest["evaluation"]
        first = training.first_evaluation if run.whole else None
        best = record.get("best_step") == record["step"]
        so_far = ", best so far" if best else ""
        parts = [f"{number(record['eval_loss'])} (step {record['step']}{so_far})"]
        if record.get("best_step") is not None and not best:
            parts.append(f"best {record['best_eval_loss']:.4f} (step {record['best_step']})")
        if first and first["step"] not in (record["step"], record.get("best_step")):
            parts.append(f"first {number(first['eval_loss'])} (step {first['step']})")
        yield "held out", Text(dot.join(parts))
    yield from _measured(training, marks)
    yield "step", Text(dot.join(_update(step)))
    speed = dot.join(_speed(step, run))
    if speed:
        yield "speed", Text(speed)
    planned = json_in(run.folder / rundir.PLAN, PLANNED).get("needed_bytes")
    memory = dot.join(_memory(step, planned, gpus))
    if memory:
        yield "memory", Text(memory)
    for label, text, warns in _gpus(gpus, dot):
        yield label, Text(text, style="yellow" if warns else "")
    if "checkpoint" in training.newest:
        saved = training.newest["checkpoint"]
        age = duration(time.time() - saved["time"])
        yield "saved", Text(f"step {saved['step']}, {age} ago")


def _measured(training: Training, marks: Marks) -> Iterator[tuple[str, RenderableType]]:
    """Yield plugins' numbers: the newest of each, and its curve."""
    measured = training.measured
    for name, values in list(measured.items())[:MOST_MEASURED]:
        step, value = values[-1]
        when = "" if step == training.step["step"] else f" at step {step}"
        text = Text(f"{value:.4g}{when}")
        curve = sparkline([value for _, value in values], CURVE_WIDTH, marks.bars)
        label = shown(name)
        if len(label) > LONGEST_LABEL:
            label = f"{label[: LONGEST_LABEL - 1]}{marks.cut}"
        yield label, text.append(f"  {curve}", style="cyan")
    left = len(measured) - MOST_MEASURED
    if left > 0:
        yield "", Text(f"{left} more measurements are in the report", style=LABEL)


def _update(step: dict[str, Any]) -> Iterator[str]:
    if step.get("grad_norm") is not None:
        yield f"gradient norm {step['grad_norm']:.3g}"
    if step.get("lr") is not None:
        yield f"learning rate {step['lr']:.3g}"
    if step.get("tokens") is not None:
        yield f"{count(step['tokens'])} target tokens"


def _speed(step: dict[str, Any], run: Run) -> Iterator[str]:
    """Yield the mean speed and, while there are steps to come, the newest step's."""
    speed = run.training.speed
    mean = speed.mean("tokens_per_second")
    if mean is None:
        return
    now = step.get("tokens_per_second")
    if now is not None and run.state == "running" and step["step"] != step.get("total_steps"):
        yield f"{count(now)} tokens/s now, {count(mean)} on average"
    else:
        yield f"{count(mean)} tokens/s on average"
    yield f"{speed.seconds / speed.steps:.3g} s/step"
    for name, label in (("mfu", "MFU"), ("data_wait_share", "data wait")):
        share = speed.mean(name)
        if share is not None:
            yield f"{label} {percent(share)}"
    record = run.training.newest.get("communication")
    if record:
        yield f"communication {percent(record['communication_share'])} (step {record['step']})"


def _memory(step: dict[str, Any], planned: int | None, gpus: Sequence[GpuReading]) -> Iterator[str]:
    peak = step.get("peak_memory_bytes")
    if peak is not None:
        sizes = [gpu.memory_total_bytes for gpu in gpus if gpu.memory_total_bytes]
        whole = f" of {gib(min(sizes))}" if sizes else ""
        yield f"{gib(peak)}{whole} GiB"
        if planned is not None:
            yield f"plan {gib(planned)} GiB"
    if step.get("peak_host_memory_bytes") is not None:
        yield f"host {gib(step['peak_host_memory_bytes'])} GiB per process"


def _gpus(gpus: Sequence[GpuReading], dot: str) -> Iterator[tuple[str, str, bool]]:
    """Yield label, text and whether something holds a GPU back; the ranges over all GPUs."""
    if not gpus:
        return
    uses = [100 * gpu.utilisation for gpu in gpus if gpu.utilisation is not None]
    degrees = [gpu.temperature for gpu in gpus if gpu.temperature is not None]
    watts = [gpu.watts for gpu in gpus if gpu.watts is not None]
    parts = [_range(uses, "% busy"), _range(degrees, "°C"), _range(watts, "W")]
    yield f"{len(gpus)} GPU" + "s" * (len(gpus) > 1), dot.join(filter(None, parts)), False
    for gpu in gpus:
        if gpu.throttled:
            yield "slowed", f"GPU {gpu.index} by {' and '.join(gpu.throttled)}", True


def _range(values: Sequence[float], unit: str) -> str:
    if not values:
        return ""
    least, most = round(min(values)), round(max(values))
    return f"{least} {unit}" if least == most else f"{least} to {most} {unit}"

"""The report of one run."""

from __future__ import annotations

import itertools
import shlex
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.contracts.metrics import kind_of, record_training
from pipeline.execution import rundir
from pipeline.execution.gpu_records import hardware_records
from pipeline.recipe.nodes import leaves
from pipeline.utils.files import replace_text
from pipeline.utils.terminal import shown
from pipeline.utils.text import count, duration, gib, human, number, percent, plural
from pipeline.view.ending import REPORT, prompts
from pipeline.view.page import (
    FIELDS,
    MOST_POINTS,
    Curve,
    Plot,
    Records,
    clock,
    curve,
    plots,
    render,
    value_text,
)
from pipeline.view.run import PLANNED, History, json_in

MOST_EVENTS = 200
MOST_ROWS = 400
"""Rows of the recipe's table."""
READINGS = (
    ("utilisation", "GPUs busy", "share of the time"),
    ("temperature", "Temperature of GPUs", "°C"),
    ("watts", "Power of a GPU", "W"),
)
"""Fields of a GPU's reading, their titles and units."""


def write_report(folder: Path, to: Path | None = None, *, ended: bool = False) -> Path:
    """Write the report of the run in `folder`, and return its path; `ended` as for `History`.
    Raises what that raises, and OSError."""
    path = to or folder / REPORT
    replace_text(path, run_page(History(folder, ended=ended)))
    return path


def run_page(history: History) -> str:
    """Return the report as HTML."""
    plan = json_in(history.folder / rundir.PLAN, PLANNED)
    events, gpus = timeline(history), list(hardware_records(history.folder))
    parts = max(-(-len(one.steps) // MOST_POINTS) for one in history.trainings)
    # as it is typed: without the path of `pipe`
    typed = [str(word) for word in history.environment.get("command", [])]
    if typed and Path(typed[0]).name in ("pipe", "pipetrain.py"):
        typed[0] = "pipe"
    here = history.environment
    names = ("time", "folder", "python", "platform")
    environment = [(name, str(here[name])) for name in names if here.get(name)]
    environment += [(name, str(version)) for name, version in (here.get("packages") or {}).items()]
    environment += [
        (f"{slot} engine: {name}".strip(), value_text(value))
        for slot, engine in history.engines.items()
        for name, value in engine.items()
    ]
    memory_title, memory_sizes = memory(history, plan)
    return render(
        "run.html.j2",
        list(report_plots(history, gpus)),
        title=history.name,
        history=history,
        command=shown(shlex.join(typed)),
        tiles=summary(history),
        parts=parts if parts > 1 else 0,
        memory=memory_sizes,
        memory_title=memory_title,
        plan_lines=[str(line) for line in plan.get("lines", [])],
        gpus=list(gpu_rows(gpus)),
        prompts=[prompt for one in history.trainings for prompt in prompts(one.records, one.label)],
        events=events[-MOST_EVENTS:],
        left_out=max(0, len(events) - MOST_EVENTS),
        recipe=itertools.islice(leaves(history.recipe.public()), MOST_ROWS),
        origins=rundir.origins(history.folder),
        environment=environment,
        written=clock(time.time()),
    )


def report_plots(history: History, gpus: Records) -> Iterator[Plot]:
    """Yield the curves of each training, and of the GPUs over its steps."""
    for training in history.trainings:
        steps, found = training.steps, list[Plot]()
        if steps:
            curves = [curve(steps, "loss", label="training")]
            if evaluations := training.evaluations:
                curves.append(curve(evaluations, "eval_loss", label="held out", dots=True))
            found.append(Plot(title="Loss", unit="nats per token", curves=curves))
        found += plots([("", training.records)], training.measured)
        others = plots([("", steps)], [name for name in FIELDS if not name.endswith("loss")])
        found += (plot for plot in others if any(plot.curves[0].mean))
        found += gpu_plots([one for one in gpus if record_training(one) == training.slot])
        yield from (replace(plot, title=training.named(plot.title)) for plot in found)


def gpu_plots(records: Records) -> Iterator[Plot]:
    """Yield curves over the steps: of all GPUs and readings of a step, mean, least and greatest."""
    for name, title, unit in READINGS:
        by_step: dict[int, list[float]] = defaultdict(list)
        for record in records:
            by_step[record["step"]] += _known(record["gpus"], name)
        if points := sorted(item for item in by_step.items() if item[1]):
            yield Plot(title=title, unit=unit, curves=[Curve.of(points)])


def gpu_rows(records: Records) -> Iterator[dict[str, str]]:
    """Yield a row for each GPU: what it did on the median, its greatest values, and how much of the
    time it was slowed down, and by what."""
    by_gpu: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for gpu in (gpu for record in records for gpu in record["gpus"]):
        by_gpu[gpu["index"]].append(gpu)
    for index, readings in sorted(by_gpu.items()):
        names = ("utilisation", "temperature", "watts", "memory_bytes")
        busy, degrees, watts, memory = (_known(readings, name) for name in names)
        slowed = Counter(reason for reading in readings for reason in reading["throttled"])
        shares = (f"{name} {percent(n / len(readings))}" for name, n in slowed.most_common())
        yield {
            "gpu": str(index),
            "busy": percent(statistics.median(busy)) if busy else "",
            "temperature": f"{max(degrees):.0f} °C" if degrees else "",
            "power": f"{statistics.median(watts):.0f} W, {max(watts):.0f} W" if watts else "",
            "memory": f"{gib(max(memory))} GiB" if memory else "",
            "slowed": ", ".join(shares) or "never",
        }


def _known(readings: Records, name: str) -> list[float]:
    return [float(reading[name]) for reading in readings if reading.get(name) is not None]


def summary(history: History) -> Iterator[tuple[str, str, str]]:
    """Yield the most important numbers of each training, and the run's time: label, value, and what
    it is compared with, or a mean of."""
    for training in history.trainings:
        named, steps, speed = training.named, training.steps, training.speed
        found, best = training.evaluations, training.best
        if steps:
            first, last = steps[0], steps[-1]
            total = last.get("total_steps")
            yield named("steps"), f"{last['step']}" + (f" of {total}" if total else ""), ""
            note = f"{number(first['loss'])} at step {first['step']}"
            yield named("training loss"), number(last["loss"]), note
        if found:  # the last loss next to the first and the best
            first, last = found[0], found[-1]
            note = f"at step {last['step']}"
            if first["step"] != last["step"]:
                note = f"{number(first['eval_loss'])} at step {first['step']}"
                if best is not None and best["step"] not in (first["step"], last["step"]):
                    note += f", best {number(best['eval_loss'])} at step {best['step']}"
            yield named("held-out loss"), number(last["eval_loss"]), note
        rate, used = speed.mean("tokens_per_second"), speed.mean("mfu")
        mean = f"mean of {plural(speed.steps, 'step')}"
        if rate is not None:
            yield named("tokens/s"), count(rate), mean
        if used is not None:
            yield named("MFU"), percent(used), mean
        if steps and steps[-1].get("tokens") is not None:
            yield named("target tokens"), count(steps[-1]["tokens"]), ""
    starts = len(history.starts)
    yield "time", duration(history.busy_seconds), "" if starts < 2 else f"{starts} starts"


def memory(history: History, plan: Mapping[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    """Return a title, and what was planned and measured of memory, as labels and sizes: of the
    training that took most."""
    last = [training.steps[-1] for training in history.trainings if training.steps]
    device, host = (
        max((one.get(f"peak_{kind}_bytes") or 0 for one in last), default=0)
        for kind in ("memory", "host_memory")
    )
    needed = plan.get("needed_bytes")
    words = ["planned"] * bool(needed or plan.get("lines")) + ["measured"] * bool(device or host)
    sizes = {
        "planned per GPU": needed,
        "measured, tensors on the fullest GPU": device,
        "measured, host memory of training in one process": host,
    }
    rows = [(label, human(size)) for label, size in sizes.items() if size]
    return f"Memory, {' and '.join(words)}", rows


@dataclass(frozen=True, kw_only=True)
class TimelineEvent:
    """An event of a run, as people read it."""

    time: float | None
    """Seconds since 1970; None where it was not recorded."""
    step: int | None = None
    kind: str
    text: str
    bad: bool = False
    """Whether somebody should look at it."""
    times: int = 1
    """How often a warning came."""


def timeline(history: History) -> list[TimelineEvent]:
    """Return starts, ends, failures, saves and what was unusual, in order of time; a warning that
    comes again, as after a resume, once."""
    found = [
        replace(event, kind=training.named(event.kind))
        for training in history.trainings
        for event in (*_saves(training.records), *_unusual(training.records))
    ]
    found += _of_journal(history.events)
    return sorted(found, key=lambda one: float("inf") if one.time is None else one.time)


def _of_journal(events: list[dict[str, Any]]) -> Iterator[TimelineEvent]:
    starts = 0
    warned = Counter(shown(str(one.get("text", ""))) for one in events if one["event"] == "warning")
    for event in events:
        kind, when = event["event"], event["time"]
        if kind == "run started":
            starts += 1
            where = f"{plural(event.get('procs', 1), 'process')}, {event.get('device', '')}"
            yield TimelineEvent(time=when, kind="start" if starts == 1 else "resume", text=where)
        elif kind in ("run failed", "run stopped"):
            bad, problem = kind == "run failed", shown(str(event.get("problem", "")))
            yield TimelineEvent(time=when, kind="failure" if bad else "stop", text=problem, bad=bad)
        elif kind == "warning":
            text = shown(str(event.get("text", "")))
            if times := warned.pop(text, 0):
                yield TimelineEvent(time=when, kind="warning", text=text, bad=True, times=times)
        elif kind == "run finished":
            yield TimelineEvent(time=when, kind="end", text="every stage finished")


def _unusual(records: Iterable[Mapping[str, Any]]) -> Iterator[TimelineEvent]:
    for record in records:
        kind, name = kind_of(record), ""
        if kind == "anomaly":
            name, text = kind, f"{record['anomaly']}: {record.get('action', '')}"
        elif kind == "ended early":
            name, text = "end of training", shown(record["ended_early"])
        elif kind == "straggler":
            name, text = kind, f"rank {record['straggler']}: {record.get('why', '')}"
        if name:
            yield TimelineEvent(
                time=record.get("time"), step=record.get("step"), kind=name, text=text,
                bad=kind != "ended early",
            )  # fmt: skip


def _saves(records: Iterable[Mapping[str, Any]]) -> Iterator[TimelineEvent]:
    """Yield saves with what they cost. Of each there are two records, of its beginning and of its
    end; either may be missing, and a step that was repeated was saved twice."""
    saves: list[dict[str, Any]] = []
    for record in records:
        kind = kind_of(record)
        if kind == "checkpoint":
            saves.append({**record})
        elif kind == "checkpoint written":
            waiting = [
                one for one in saves
                if one["step"] == record["step"] and "checkpoint_seconds" not in one
            ]  # fmt: skip
            if waiting:
                waiting[0].update({**record, "time": waiting[0].get("time")})
            else:
                saves.append({**record})
    for save in saves:
        cost = ["not recorded as written"]
        if "checkpoint_seconds" in save:
            size = f"{human(save['checkpoint_bytes'])} " if "checkpoint_bytes" in save else ""
            cost = [f"{size}on disk after {save['checkpoint_seconds']:.2f} s"]
        if "checkpoint_stall_seconds" in save:
            cost.append(f"training paused for {save['checkpoint_stall_seconds']:.2f} s")
        if save.get("checkpoint_slowed_seconds", 0) > 0:
            cost.append(f"steps took {save['checkpoint_slowed_seconds']:.2f} s longer meanwhile")
        if "checkpoint_user_seconds" in save:
            spent = save["checkpoint_user_seconds"] + save["checkpoint_system_seconds"]
            cost.append(f"{spent:.2f} s of processor time")
        said = ", ".join(cost)
        yield TimelineEvent(time=save.get("time"), step=save["step"], kind="save", text=said)

"""A report's words and tables."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.execution.metrics import kind_of
from pipeline.utils.terminal import shown
from pipeline.utils.text import duration, human, plural
from pipeline.view.history import History
from pipeline.view.words import count, percent


@dataclass(frozen=True, kw_only=True)
class Mark:
    """An event of a run, as people read it."""

    time: float | None
    """Seconds since 1970; None where it was not recorded."""
    step: int | None
    kind: str
    text: str
    bad: bool = False
    """Whether somebody should look at it."""


def marks(history: History) -> list[Mark]:
    """Return starts, ends, failures, saves and what was unusual, in order of time."""
    found = [*_of_metrics(history.metrics), *_of_journal(history.events)]
    known = [mark for mark in found if mark.time is not None]
    timeless = [mark for mark in found if mark.time is None]
    return [*sorted(known, key=lambda mark: mark.time or 0.0), *timeless]


def _of_journal(events: list[dict[str, Any]]) -> Iterator[Mark]:
    starts = 0
    for event in events:
        kind, when = event["event"], event["time"]
        if kind == "run started":
            starts += 1
            where = f"{plural(event.get('procs', 1), 'process')}, {event.get('device', '')}"
            yield Mark(time=when, step=None, kind="start" if starts == 1 else "resume", text=where)
        elif kind in ("run failed", "run stopped"):
            problem = shown(str(event.get("problem", "")))
            bad = kind == "run failed"
            name = "failure" if bad else "stop"
            yield Mark(time=when, step=None, kind=name, text=problem, bad=bad)
        elif kind == "warning":
            text = shown(str(event.get("text", "")))
            yield Mark(time=when, step=None, kind="warning", text=text, bad=True)
        elif kind == "run finished":
            yield Mark(time=when, step=None, kind="end", text="every stage has finished")


def _of_metrics(records: list[dict[str, Any]]) -> Iterator[Mark]:
    for record in records:
        kind, when, step = kind_of(record), record.get("time"), record.get("step")
        if kind == "checkpoint":
            stall = record["checkpoint_stall_seconds"]
            text = f"training stood still for {stall:.2f} s"
            yield Mark(time=when, step=step, kind="save", text=text)
        elif kind == "checkpoint written":
            yield Mark(time=when, step=step, kind="save", text=_cost(record))
        elif kind == "anomaly":
            text = f"{record['anomaly']}: {record.get('action', '')}"
            yield Mark(time=when, step=step, kind="anomaly", text=text, bad=True)
        elif kind == "straggler":
            text = f"rank {record['straggler']}: {record.get('why', '')}"
            yield Mark(time=when, step=step, kind="straggler", text=text, bad=True)


def _cost(record: Mapping[str, Any]) -> str:
    """The cost of writing a checkpoint, as far as it was recorded."""
    parts = [f"on disk after {record['checkpoint_seconds']:.2f} s"]
    if "checkpoint_user_seconds" in record:
        spent = record["checkpoint_user_seconds"] + record["checkpoint_system_seconds"]
        parts.append(f"{spent:.2f} s of processors")
    if "checkpoint_slowed_seconds" in record:
        parts.append(f"steps during it took {record['checkpoint_slowed_seconds']:+.2f} s")
    return ", ".join(parts)


def summary(history: History) -> list[tuple[str, str]]:
    """Return the run's most important numbers, as labels and values."""
    return [(label, value) for label, value in _summary(history) if value]


def _summary(history: History) -> Iterator[tuple[str, str]]:
    steps = history.steps
    last: Mapping[str, Any] = steps[-1] if steps else {}
    total = last.get("total_steps")
    if last:
        yield "steps", f"{last['step']}" + (f" of {total}" if total else "")
        yield "loss", _number(last.get("loss"), ".4f")
    if history.best:
        best = history.best
        yield f"held-out loss at step {best['step']}", f"{best['eval_loss']:.4f}"
    speed, used = median_of(steps, "tokens_per_second"), median_of(steps, "mfu")
    if speed is not None:
        yield "tokens/s", count(speed)
    if used is not None:
        yield "MFU", percent(used)
    if last.get("tokens") is not None:
        yield "target tokens", count(last["tokens"])
    yield "time", duration(busy_seconds(history))


def median_of(records: Iterable[Mapping[str, Any]], name: str) -> float | None:
    """Return the median of a field over the records that have it; None if none does."""
    values = [record[name] for record in records if record.get(name) is not None]
    return statistics.median(values) if values else None


def busy_seconds(history: History) -> float:
    """Return the seconds that all starts of the run took together."""
    total, began = 0.0, None
    for event in history.events:
        if event["event"] == "run started":
            began = event["time"]
        elif event["event"] in ("run finished", "run failed", "run stopped") and began is not None:
            total += event["time"] - began
            began = None
    if began is not None and history.state == "running":
        total += max(0.0, time.time() - began)
    return total


def where(history: History) -> str:
    """Return strategy, processes and device: `fully_shard, 8 processes, cuda`."""
    starts = [event for event in history.events if event["event"] == "run started"]
    newest: Mapping[str, Any] = starts[-1] if starts else {}
    engine = str(history.engine.get("engine", ""))
    processes = plural(newest["procs"], "process") if "procs" in newest else ""
    device = str(history.engine.get("device") or newest.get("device", ""))
    return ", ".join(filter(None, (engine, processes, device)))


def memory_rows(history: History, plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what was planned and measured of memory, as labels and sizes."""
    steps = history.steps
    last: Mapping[str, Any] = steps[-1] if steps else {}
    sizes = {
        "planned, a GPU": plan.get("needed_bytes"),
        "measured, tensors on the fullest GPU": last.get("peak_memory_bytes"),
        "measured, host memory that training took in a process": last.get("peak_host_memory_bytes"),
    }
    return [(label, human(size)) for label, size in sizes.items() if size]


def _number(value: float | None, form: str) -> str:
    return "not a number" if value is None else f"{value:{form}}"

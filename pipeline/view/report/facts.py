"""A report's words and tables."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline.contracts.metrics import kind_of
from pipeline.execution.run_state import Training
from pipeline.utils.terminal import shown
from pipeline.utils.text import count, duration, human, number, percent, plural
from pipeline.view.run import History


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
    times: int = 1
    """How often a warning came."""


def marks(history: History) -> list[Mark]:
    """Return starts, ends, failures, saves and what was unusual, in order of time; a warning that
    comes again, as after a resume, once."""
    found = [
        replace(mark, kind=training.named(mark.kind))
        for training in history.trainings
        for mark in _of_metrics(training)
    ]
    found += _of_journal(history.events)
    known = [mark for mark in found if mark.time is not None]
    timeless = [mark for mark in found if mark.time is None]
    return [*sorted(known, key=lambda mark: mark.time or 0.0), *timeless]


def _of_journal(events: list[dict[str, Any]]) -> Iterator[Mark]:
    starts = 0
    warned = Counter(shown(str(one.get("text", ""))) for one in events if one["event"] == "warning")
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
            times = warned.pop(text, 0)
            if times:
                yield Mark(
                    time=when, step=None, kind="warning", text=text, bad=True, times=times
                )  # fmt: skip
        elif kind == "run finished":
            yield Mark(time=when, step=None, kind="end", text="every stage finished")


def _of_metrics(training: Training) -> Iterator[Mark]:
    for begun, written in _saves(training.records):
        first = begun or written
        text = ", ".join(_cost({**begun, **written}, on_disk=bool(written)))
        yield Mark(time=first.get("time"), step=first["step"], kind="save", text=text)
    for record in training.records:
        kind, when, step = kind_of(record), record.get("time"), record.get("step")
        if kind == "anomaly":
            text = f"{record['anomaly']}: {record.get('action', '')}"
            yield Mark(time=when, step=step, kind="anomaly", text=text, bad=True)
        elif kind == "ended early":
            text = shown(record["ended_early"])
            yield Mark(time=when, step=step, kind="end of training", text=text)
        elif kind == "straggler":
            text = f"rank {record['straggler']}: {record.get('why', '')}"
            yield Mark(time=when, step=step, kind="straggler", text=text, bad=True)


def _saves(
    records: Iterable[Mapping[str, Any]],
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return the two records of each save: of its beginning, and of its end; one that is missing is
    empty."""
    saves: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
    for record in records:
        kind = kind_of(record)
        if kind == "checkpoint":
            saves.append((record, {}))
        elif kind == "checkpoint written":
            waiting = (
                at for at, (begun, written) in enumerate(saves)
                if not written and begun["step"] == record["step"]
            )  # fmt: skip
            at = next(waiting, None)
            if at is None:
                saves.append(({}, record))
            else:
                saves[at] = saves[at][0], record
    return saves


def _cost(record: Mapping[str, Any], *, on_disk: bool) -> Iterator[str]:
    """Yield what a save cost, as far as it was recorded."""
    if not on_disk:
        yield "not recorded as written"
    elif "checkpoint_bytes" in record:
        size = human(record["checkpoint_bytes"])
        yield f"{size} on disk after {record['checkpoint_seconds']:.2f} s"
    else:
        yield f"on disk after {record['checkpoint_seconds']:.2f} s"
    if "checkpoint_stall_seconds" in record:
        yield f"training paused for {record['checkpoint_stall_seconds']:.2f} s"
    if record.get("checkpoint_slowed_seconds", 0) > 0:
        yield f"steps took {record['checkpoint_slowed_seconds']:.2f} s longer meanwhile"
    if "checkpoint_user_seconds" in record:
        spent = record["checkpoint_user_seconds"] + record["checkpoint_system_seconds"]
        yield f"{spent:.2f} s of processor time"


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One of a run's most important numbers."""

    label: str
    value: str
    note: str = ""
    """What it is compared with, or a mean of."""


def summary(history: History) -> Iterator[Tile]:
    """Yield the most important numbers of each training, and the run's time."""
    for training in history.trainings:
        for tile in _numbers(training):
            yield replace(tile, label=training.named(tile.label))
    starts = sum(event["event"] == "run started" for event in history.events)
    note = "" if starts < 2 else f"{starts} starts"
    yield Tile(label="time", value=duration(busy_seconds(history)), note=note)


def _numbers(training: Training) -> Iterator[Tile]:
    steps = training.steps
    if steps:
        first, last = steps[0], steps[-1]
        total = last.get("total_steps")
        yield Tile(label="steps", value=f"{last['step']}" + (f" of {total}" if total else ""))
        note = f"{number(first['loss'])} at step {first['step']}"
        yield Tile(label="training loss", value=number(last["loss"]), note=note)
    found, best = training.evaluations, training.best
    if found:  # the last loss next to the first and the best
        first, last = found[0], found[-1]
        told = [f"{number(first['eval_loss'])} at step {first['step']}"]
        if best is not None and best["step"] not in (first["step"], last["step"]):
            told.append(f"best {number(best['eval_loss'])} at step {best['step']}")
        note = ", ".join(told) if first["step"] != last["step"] else f"at step {last['step']}"
        yield Tile(label="held-out loss", value=number(last["eval_loss"]), note=note)
    speed = training.speed
    rate, used = speed.mean("tokens_per_second"), speed.mean("mfu")
    mean = f"mean of {plural(speed.steps, 'step')}"
    if rate is not None:
        yield Tile(label="tokens/s", value=count(rate), note=mean)
    if used is not None:
        yield Tile(label="MFU", value=percent(used), note=mean)
    if steps and steps[-1].get("tokens") is not None:
        yield Tile(label="target tokens", value=count(steps[-1]["tokens"]))


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
    """Return the strategy of each training, processes and device: `fully_shard, 8 processes,
    cuda`."""
    starts = [event for event in history.events if event["event"] == "run started"]
    newest: Mapping[str, Any] = starts[-1] if starts else {}
    engines = [*history.engines.values()]
    kinds = " then ".join(dict.fromkeys(str(one.get("engine", "")) for one in engines))
    processes = plural(newest["procs"], "process") if "procs" in newest else ""
    device = next((str(one["device"]) for one in engines if "device" in one), "")
    return ", ".join(filter(None, (kinds, processes, device or str(newest.get("device", "")))))


def memory_rows(history: History, plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what was planned and measured of memory, as labels and sizes: of the training that
    took most."""
    last = [training.steps[-1] for training in history.trainings if training.steps]

    def most(name: str) -> int:
        return max((one.get(name) or 0 for one in last), default=0)

    sizes = {
        "planned per GPU": plan.get("needed_bytes"),
        "measured, tensors on the fullest GPU": most("peak_memory_bytes"),
        "measured, host memory of training in one process": most("peak_host_memory_bytes"),
    }
    return [(label, human(size)) for label, size in sizes.items() if size]


def memory_title(labels: Iterable[str], plan: Mapping[str, Any]) -> str:
    """Return the heading over what there is of the memory's plan and measurements."""
    words = {label.partition(" ")[0].rstrip(",") for label in labels}
    planned = "planned" in words or bool(plan.get("lines"))
    both = planned and "measured" in words
    return f"Memory, {'planned and measured' if both else 'planned' if planned else 'measured'}"

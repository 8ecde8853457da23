"""Steps under torch.profiler."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pipeline import DistContext, Engine
from pipeline.hardware import memory_history, write_snapshot
from stages.batches.feed import WAIT

T = TypeVar("T")


class Breakdown(NamedTuple):
    """Shares of a step's time, 0 to 1, which add up to 1; NaN: not known."""

    compute: float
    """The rank computed."""
    communication: float
    """A collective was under way, and the rank computed nothing; waiting for slower ranks too."""
    data: float
    """The rank waited for a micro-batch, and did neither."""
    idle: float
    """None of these: the interpreter, launches of kernels, gaps between them."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Result of profiling a step."""

    seconds: float
    """Duration of the step, including the profiler's own work in it."""
    shares: Breakdown
    """Means of the ranks'; NaN if a rank's is not known."""


class Profiler:
    """Records some of the steps, and writes each rank's traces to a folder."""

    def __init__(
        self, steps: Sequence[int], folder: Path, engine: Engine, dist: DistContext
    ) -> None:
        self._steps, self._folder, self._engine, self._dist = steps, folder, engine, dist

    def due(self, step: int) -> bool:
        """Whether the step of this number is recorded."""
        return step in self._steps

    def run(self, step: int, take: Callable[[], T]) -> tuple[T, Profile | None]:
        """Call `take`, the step of this number; returns its result. If the step is recorded, write
        its trace, and return its profile too (collective)."""
        if not self.due(step):
            return take(), None
        device, ranks = self._engine.device, self._dist.world_size
        on_gpu = device.type == "cuda"
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"step-{step:08d}-rank-{self._dist.rank:05d}.json.gz"
        with self._memory(path, on_gpu=on_gpu), profile(activities=kinds) as recorded:
            # Starting takes some ranks longer than others.
            self._engine.total(torch.zeros((), device=device))
            began = time.perf_counter()
            with record_function(STEP):
                taken = take()
                if on_gpu:
                    torch.cuda.synchronize(device)
            seconds = time.perf_counter() - began
        recorded.export_chrome_trace(str(path))
        with gzip.open(path, "rt", encoding="utf-8") as file:
            own = breakdown(json.load(file)["traceEvents"], ranks=ranks)
        total = self._engine.total(torch.tensor(own, dtype=torch.float64, device=device)) / ranks
        return taken, Profile(seconds=seconds, shares=Breakdown(*total.tolist()))

    @contextlib.contextmanager
    def _memory(self, trace: Path, *, on_gpu: bool) -> Iterator[None]:
        """Record what the body allocates on a GPU, and write it next to the trace."""
        if not on_gpu:
            yield
            return
        with memory_history():
            yield
            write_snapshot(trace.with_name(trace.name.replace(".json.gz", "-memory.json.gz")))


Event = Mapping[str, Any]
Span = tuple[float, float]
"""Start and end, in microseconds."""

STEP = "pipe: step"
"""The annotation around the step."""
GLOO = "gloo:"
NCCL = "nccl"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
NO_WORK = ("c10d::", "_c10d_functional::", "autograd::", "torch::autograd::")
"""Operators in which a thread may only wait, or that only contain others."""


def breakdown(events: Sequence[Event], *, ranks: int) -> Breakdown:
    """Return what a step's time went to, by its trace; communication is not known if the trace of
    several ranks shows no collective. On GPUs: NCCL's kernels, other kernels and copies. On CPUs:
    gloo's operations, and innermost operators of the training thread, the interpreter's time
    between them left out."""
    events = [event for event in events if event.get("ph") == "X"]
    step = next(e for e in events if e["name"] == STEP and e.get("cat") == "user_annotation")
    kernels = [event for event in events if event.get("cat") in ON_DEVICE]
    if kernels:
        collectives = [_span(event) for event in kernels if NCCL in event["name"].lower()]
        busy = [_span(event) for event in kernels if NCCL not in event["name"].lower()]
    else:
        collectives = [_span(event) for event in events if event["name"].startswith(GLOO)]
        busy = list(_computing(e for e in events if e.get("tid") == step["tid"]))
    waits = [_span(event) for event in events if event["name"] == WAIT]
    start, end = _span(step)
    compute, communication, data = (
        time / (end - start) for time in _times([busy, collectives, waits], start, end)
    )
    found = Breakdown(compute, communication, data, 1 - compute - communication - data)
    unknown = ranks > 1 and not collectives
    return found._replace(communication=math.nan, idle=math.nan) if unknown else found


def _times(kinds: Sequence[Iterable[Span]], start: float, end: float) -> list[float]:
    """The time in [start, end) that spans of each kind cover, without spans of earlier kinds."""
    edges = [
        (min(max(moment, start), end), kind, change)
        for kind, spans in enumerate(kinds)
        for span in spans
        for moment, change in zip(span, (1, -1), strict=True)
    ]
    times, active, before = [0.0] * len(kinds), [0] * len(kinds), start
    for moment, kind, change in sorted(edges):
        first = next((number for number, count in enumerate(active) if count), None)
        if first is not None:
            times[first] += moment - before
        before = moment
        active[kind] += change
    return times


def _computing(events: Iterable[Event]) -> Iterator[Span]:
    """Times of a thread's operators that compute and contain no other event."""
    ordered = sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0)))
    for event, following in itertools.zip_longest(ordered, ordered[1:]):
        contains = following is not None and following["ts"] < _span(event)[1]
        works = event.get("cat") == "cpu_op" and not event["name"].startswith(NO_WORK)
        if works and "::" in event["name"] and not contains:
            yield _span(event)


def _span(event: Event) -> Span:
    return event["ts"], event["ts"] + event.get("dur", 0)

"""Steps under torch.profiler."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pipeline import DistContext, Engine

FOLDER = "profile"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Result of profiling a step."""

    seconds: float
    """Duration of the step, including the profiler's own work in it."""
    communication: float
    """Mean of the ranks' `communication_share`; NaN if a rank's is not known."""


class Profiler:
    """Records some of the steps, and writes each rank's traces to the run's folder."""

    def __init__(
        self, steps: Sequence[int], run_dir: Path, engine: Engine, dist: DistContext
    ) -> None:
        self._steps = frozenset(steps)
        self._folder = run_dir / FOLDER
        self._engine = engine
        self._dist = dist

    def run(self, step: int, take: Callable[[], T]) -> tuple[T, Profile | None]:
        """Call `take`, the step of this number; returns its result. If the step is to be recorded,
        write its trace, and return its profile too (collective)."""
        if step not in self._steps:
            return take(), None
        device, ranks = self._engine.device, self._dist.world_size
        on_gpu = device.type == "cuda"
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=kinds) as recorded:
            # Starting takes some ranks longer than others.
            self._engine.total(torch.zeros((), device=device))
            began = time.perf_counter()
            with record_function(STEP):
                taken = take()
                if on_gpu:
                    torch.cuda.synchronize(device)
            seconds = time.perf_counter() - began
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"step-{step:08d}-rank-{self._dist.rank:05d}.json.gz"
        recorded.export_chrome_trace(str(path))
        with gzip.open(path, "rt", encoding="utf-8") as file:
            share = communication_share(json.load(file)["traceEvents"], ranks=ranks)
        total = torch.tensor(math.nan if share is None else share, device=device)
        communication = float(self._engine.total(total)) / ranks
        return taken, Profile(seconds=seconds, communication=communication)


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


def communication_share(events: Sequence[Event], *, ranks: int) -> float | None:
    """Share of the step during which a collective was under way and this rank computed nothing, 0
    to 1; None if the trace of several ranks shows no collective. On GPUs: NCCL's kernels without
    any other kernel or copy. On CPUs: gloo's operations while the training thread is in no
    innermost operator, the interpreter's time included. Both include waiting for slower ranks."""
    events = [event for event in events if event.get("ph") == "X"]
    step = next(e for e in events if e["name"] == STEP and e.get("cat") == "user_annotation")
    kernels = [event for event in events if event.get("cat") in ON_DEVICE]
    if kernels:
        collectives = [_span(event) for event in kernels if NCCL in event["name"].lower()]
        busy = [_span(event) for event in kernels if NCCL not in event["name"].lower()]
    else:
        collectives = [_span(event) for event in events if event["name"].startswith(GLOO)]
        busy = list(_computing(e for e in events if e.get("tid") == step["tid"]))
    if not collectives:
        return None if ranks > 1 else 0.0
    start, end = _span(step)
    return _exposed(collectives, busy, start, end) / (end - start)


def _exposed(collectives: Iterable[Span], busy: Iterable[Span], start: float, end: float) -> float:
    """Time in [start, end) that spans of `collectives` cover and spans of `busy` do not."""
    edges = [
        (min(max(moment, start), end), kind, change)
        for kind, spans in enumerate((collectives, busy))
        for span in spans
        for moment, change in zip(span, (1, -1), strict=True)
    ]
    exposed, before, active = 0.0, start, [0, 0]
    for moment, kind, change in sorted(edges):
        if active[0] and not active[1]:
            exposed += moment - before
        before = moment
        active[kind] += change
    return exposed


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

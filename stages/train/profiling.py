"""Steps under torch.profiler."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed
from torch.profiler import ProfilerActivity, profile, record_function

from pipeline.contracts.engine import Engine

FOLDER = "profile"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What the profile of a step says."""

    seconds: float
    """Of the step, the profiler's own work in it included."""
    communication: float | None
    """Mean of the ranks' `communication_share`; None if it cannot be told."""


class Profiler:
    """Records some of the steps, and leaves each rank's traces in the run's folder."""

    def __init__(self, steps: Sequence[int], run_dir: Path, engine: Engine) -> None:
        self._steps = frozenset(steps)
        self._folder = run_dir / FOLDER
        self._engine = engine

    def wants(self, step: int) -> bool:
        """Whether the step of this number is to be recorded."""
        return step in self._steps

    def record(self, step: int, take: Callable[[], T]) -> tuple[T, Profile]:
        """Call `take`, which is that step, and write its trace (collective). Returns what it
        returns."""
        device, shard = self._engine.device, self._engine.shard
        on_gpu = device.type == "cuda"
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=kinds) as recorded:
            _wait_for_all(shard.count)  # starting takes some ranks longer than others
            began = time.perf_counter()
            with record_function(STEP):
                taken = take()
                if on_gpu:
                    torch.cuda.synchronize(device)
            seconds = time.perf_counter() - began
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"step-{step:08d}-rank-{shard.index:05d}.json.gz"
        recorded.export_chrome_trace(str(path))
        with gzip.open(path, "rt", encoding="utf-8") as file:
            share = communication_share(json.load(file)["traceEvents"], ranks=shard.count)
        return taken, Profile(seconds=seconds, communication=_mean(share, shard.count, device))


def _wait_for_all(ranks: int) -> None:
    if ranks > 1:
        torch.distributed.barrier()


def _mean(share: float | None, ranks: int, device: torch.device) -> float | None:
    """Over all ranks; None if one cannot tell."""
    told = torch.tensor([share or 0.0, float(share is not None)], device=device)
    if ranks > 1:
        torch.distributed.all_reduce(told)
    total, known = told.tolist()
    return total / ranks if round(known) == ranks else None


Event = Mapping[str, Any]
Span = tuple[float, float]
"""Start and end, in microseconds."""

STEP = "pipe: step"
"""The annotation around the step."""
GLOO = "gloo:"
NCCL = "nccl"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
NO_WORK = ("c10d::", "_c10d_functional::", "autograd::", "torch::autograd::")
"""Operators in which a thread may do nothing but wait, or that only surround others."""


def communication_share(events: Sequence[Event], *, ranks: int) -> float | None:
    """Part of the step during which a collective was under way and this rank computed nothing, from
    0 to 1; None where the trace of several ranks shows no collective.

    On GPUs: the time of NCCL's kernels in which no other kernel and no copy runs. On CPUs: that of
    gloo's operations in which the training thread is in no operator. Either holds what a rank waits
    for slower ones, and on CPUs the interpreter's time while a collective is under way.
    """
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
    whole = _span(step)
    under_way = _within(_union(collectives), whole)
    exposed = _length(under_way) - _length(_common(under_way, _union(busy)))
    return exposed / (whole[1] - whole[0])


def _computing(events: Iterable[Event]) -> Iterator[Span]:
    """When the innermost event of a thread is an operator that computes."""
    open_: list[Event] = []
    since = 0.0
    for now, event in _edges(events):
        if open_ and _computes(open_[-1]) and now > since:
            yield since, now
        since = now
        if event is None:
            open_.pop()
        else:
            open_.append(event)


def _edges(events: Iterable[Event]) -> Iterator[tuple[float, Event | None]]:
    """Beginnings (with the event) and ends (None) in the order of time."""
    ends: list[float] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0))):
        start, end = _span(event)
        while ends and ends[-1] <= start:
            yield ends.pop(), None
        yield start, event
        # Rounding can let a part end later than the whole.
        ends.append(min(end, ends[-1]) if ends else end)
    while ends:
        yield ends.pop(), None


def _computes(event: Event) -> bool:
    name = event["name"]
    return event.get("cat") == "cpu_op" and "::" in name and not name.startswith(NO_WORK)


def _span(event: Event) -> Span:
    return event["ts"], event["ts"] + event.get("dur", 0)


def _union(spans: Iterable[Span]) -> list[Span]:
    """The same time without overlaps, in order."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _within(spans: Iterable[Span], whole: Span) -> list[Span]:
    cut = [(max(start, whole[0]), min(end, whole[1])) for start, end in spans]
    return [(start, end) for start, end in cut if start < end]


def _common(ones: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Time that is in both; each is in order and without overlaps."""
    found, first = [], 0
    for one in ones:
        while first < len(others) and others[first][1] <= one[0]:
            first += 1
        for other in others[first:]:
            if other[0] >= one[1]:
                break
            found.append((max(one[0], other[0]), min(one[1], other[1])))
    return found


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)

"""A plan for people: tables in GiB and seconds, and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pipeline.accelerators import GIB
from pipeline.planning.estimate import Estimate
from pipeline.planning.step_time import crosses, origin, sent
from pipeline.planning.strategy import Held
from pipeline.throughput import human

if TYPE_CHECKING:
    from pipeline.planning.memory_plan import MemoryPlan


def verdict(drawn: MemoryPlan) -> str:
    """Whether it fits; a line for each shortage."""
    if drawn.short:
        return "\n".join(
            f"does not fit: {gib(s.needed)} GiB of {s.what} needed ({s.phase}), "
            f"{gib(s.there)} there"
            for s in drawn.short
        )
    gpu, host, peak = drawn.hardware.device_memory, drawn.hardware.host_memory, drawn.estimate.peak
    needed = gib(drawn.estimate.host_peak)
    if drawn.topology.device == "cpu" and host is not None:
        return f"fits: {needed} GiB of {gib(host)} host memory"
    if gpu is None:
        return "whether it fits: say --gpu or --memory"
    if host is None:
        beside = f"if each node has {needed} GiB of host memory (--host-memory)"
    else:
        beside = f"{gib(host - drawn.estimate.host_peak)} GiB of each host's memory"
    return f"fits: {gib(gpu - drawn.margins.of(peak))} GiB of each GPU to spare, {beside}"


def lines(drawn: MemoryPlan) -> Iterator[str]:
    """Memory, disk, network and time."""
    estimate = drawn.estimate
    if drawn.topology.device == "cpu":
        yield from _table("memory per node, GiB", estimate.host)
    else:
        yield from _table("memory per GPU, GiB", estimate.device)
        yield from _margins(drawn)
        yield ""
        yield from _table("host memory per node, GiB", estimate.host)
    yield ""
    for file in estimate.storage:
        yield f"disk: {human(file.bytes)} for {file.what} ({file.formula})"
    for item, size in estimate.disk.items():
        yield f"disk of a node: {human(size)} for {item}"
    yield from _moved(drawn)
    yield from _time(drawn)
    for caveat in (*estimate.caveats, *drawn.hardware.caveats):
        yield f"not counted: {caveat}"


def comparison(how: str, traced: Estimate, profiled: Estimate) -> Iterator[str]:
    """A trace beside what the profile says."""
    yield how
    apart = profiled.peak / traced.peak - 1
    yield f"without --trace: {gib(profiled.peak)} GiB at the peak of a rank: {apart:+.1%}"


def explanations(estimate: Estimate) -> Iterator[str]:
    """How each item comes about."""
    yield "how these come about"
    peaks = [*estimate.device.values(), *estimate.host.values()]
    seen = dict.fromkeys([*(item for held in peaks for item in held.items), *estimate.disk])
    width = max(map(len, seen), default=0)
    for item in seen:
        yield f"  {item:<{width}}  {estimate.formulas.get(item, '')}".rstrip()


def _table(title: str, peaks: Mapping[str, Held]) -> Iterator[str]:
    """Items as rows, phases as columns."""
    items = list(dict.fromkeys(item for peak in peaks.values() for item in peak.items))
    width = max((len(item) for item in [title, *items]), default=0)
    columns = [(phase, max(len(phase), 6)) for phase in peaks]
    yield f"{title:<{width}}" + "".join(f"  {phase:>{size}}" for phase, size in columns)
    for item in items:
        cells = ((peaks[phase].items.get(item, 0), size) for phase, size in columns)
        yield f"{item:<{width}}" + "".join(f"  {_cell(value):>{size}}" for value, size in cells)
    totals = ((peaks[phase].bytes, size) for phase, size in columns)
    yield f"{'together':<{width}}" + "".join(f"  {gib(value):>{size}}" for value, size in totals)


def _margins(drawn: MemoryPlan) -> Iterator[str]:
    margins, peak, there = drawn.margins, drawn.estimate.peak, drawn.hardware.device_memory
    yield (
        f"with {margins.fragmentation:.0%} lost between tensors and {gib(margins.overhead)} GiB "
        f"beside them ({margins.source}): {gib(margins.of(peak))} GiB"
        + (f" of {gib(there)}" if there is not None else "")
    )
    if margins.measured is not None:
        yield (
            f"that run's tensors took {gib(margins.measured)} GiB at the peak; the plan says "
            f"{gib(peak)} ({peak / margins.measured - 1:+.1%})"
        )


def _moved(drawn: MemoryPlan) -> Iterator[str]:
    for traffic in drawn.estimate.traffic:
        where = "between nodes" if crosses(traffic, drawn.topology) else "inside a node"
        yield (
            f"network per step: {traffic.collective} of {human(traffic.bytes)} of {traffic.what} "
            f"among {traffic.ranks} ranks {where}, {human(sent(traffic))} sent by each"
        )
    copies = drawn.estimate.copies
    if copies.up or copies.down:
        up, down = human(copies.up), human(copies.down)
        yield f"copies per step: {up} from its host to each GPU, {down} back"
    if copies.disk:
        yield f"copies per step: {human(copies.disk)} read and written by each rank on disk"


def _time(drawn: MemoryPlan) -> Iterator[str]:
    """By resource, and what comes of it."""
    time, speed, peak = drawn.time, drawn.speed, drawn.hardware.peak
    if time.parts:
        width = max(map(len, [*time.parts, "time per step, s"]))
        yield f"{'time per step, s':<{width}}  {'at least':>8}  {'expected':>8}"
        for part, least in time.parts.items():
            numbers = f"{least:>8.3g}  {time.reached[part]:>8.3g}"
            yield f"{part:<{width}}  {numbers}  {origin(part, drawn.hardware)}"
        yield f"{'one step':<{width}}  {time.least:>8.3g}  {time.expected:>8.3g}"
    if time.unknown:
        yield f"not in the time per step: {', '.join(time.unknown)}, whose rate is not given"
    if speed is not None:
        each = "process" if drawn.topology.device == "cpu" else "GPU"
        yield (
            f"expected: {speed.tokens_per_second:,.0f} tokens/s, "
            f"{speed.tokens_per_second_per_rank:,.0f} per {each}"
            + (f", MFU {speed.mfu:.0%} of {peak / 1e12:.0f} TFLOP/s" if speed.mfu and peak else "")
        )
    if speed is not None and speed.hours is not None:
        cost = "" if speed.cost is None else f", at a cost of {speed.cost:,.2f}"
        steps = drawn.estimate.step.length.steps
        yield f"expected: {speed.hours:,.2f} hours for {steps:,} steps{cost}"


def _cell(size: int) -> str:
    return gib(size) if size else "-"


def gib(size: int) -> str:
    """GiB, with as many digits as mean something."""
    value = size / GIB
    return f"{value:.1f}" if value >= 0.1 else f"{value:.2f}" if value >= 0.01 else "0.00"

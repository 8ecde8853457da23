"""A plan for people: tables in GiB and seconds, and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pipeline.hardware.gpus import GIB
from pipeline.planning.memory_plan import MemoryPlan
from pipeline.planning.step_time import crossing, sent
from pipeline.planning.strategy import Held
from pipeline.utils.text import human

WORDS = {"device": "GPU", "host": "host"}


def lines(memory_plan: MemoryPlan) -> Iterator[str]:
    """Whether it fits, memory, disk, network and time."""
    estimate, margins = memory_plan.estimate, memory_plan.margins
    short = (f"a {WORDS[place]} in {phase}" for place, phase in memory_plan.short.items())
    too_much = f"does not fit ({', '.join(short)})"
    said = f"{too_much if memory_plan.short else 'fits'}: {memory(memory_plan)}"
    yield "whether it fits: say --gpu or --memory" if memory_plan.fits is None else said
    yield from _head(memory_plan)
    yield ""
    if memory_plan.topology.device != "cpu":
        yield from _memory("memory per GPU, GiB", estimate.device)
        between, beside = f"{margins.fragmentation:.0%}", gib(margins.overhead)
        whole = f"{gib(margins.of(estimate.peak))} GiB"
        lost = f"with {between} lost between tensors and {beside} GiB beside them"
        yield f"{lost} ({margins.source}): {whole}"
        yield ""
    yield from _memory("host memory per node, GiB", estimate.host)
    yield ""
    for file in estimate.storage:
        yield f"disk: {human(file.bytes)} for {file.what}"
    for item, size in estimate.offloaded.items():
        yield f"disk of a node: {human(size)} for {item}"
    yield from _moved(memory_plan)
    yield from _time(memory_plan)
    yield from (f"not counted: {caveat}" for caveat in estimate.caveats)
    yield from (f"warning: {warning}" for warning in memory_plan.plan.warnings)
    if memory_plan.profiled is not None:
        results, apart = gib(memory_plan.profiled), memory_plan.profiled / estimate.peak - 1
        yield f"traced; without --trace: {results} GiB at the peak of a rank: {apart:+.1%}"


def memory(memory_plan: MemoryPlan) -> str:
    """GiB of a GPU and of a host, for people; a host that is not known is a condition."""
    host, hosts = gib(memory_plan.estimate.host_peak), memory_plan.hardware.host_memory
    on_host = f"{host} GiB of {gib(hosts)} a host" if hosts else f"if a host has {host} GiB"
    if memory_plan.topology.device == "cpu":
        return on_host
    device, there = (
        gib(memory_plan.margins.of(memory_plan.estimate.peak)),
        memory_plan.hardware.device_memory,
    )
    return f"{device} GiB{f' of {gib(there)}' if there else ''} a GPU, {on_host}"


def _head(memory_plan: MemoryPlan) -> Iterator[str]:
    ranks, nodes, step = (
        memory_plan.topology.ranks,
        memory_plan.topology.nodes,
        memory_plan.estimate.step,
    )
    device = (
        "CPU process"
        if memory_plan.topology.device == "cpu"
        else memory_plan.hardware.kind or "GPU"
    )
    name, written = memory_plan.plan.recipe.name, memory_plan.plan.recipe.launch.procs
    yield f"{name} on {nodes} node{'s' * (nodes > 1)}, {ranks} x {device}"
    if written not in (None, ranks):
        yield f"the recipe says {written} processes; planned for {ranks}, as machines"
    parameters, trained = memory_plan.model.parameters, memory_plan.model.trained
    yield f"{parameters / 1e9:.3g} G parameters, {trained / 1e9:.3g} G of them trained"
    yield (
        f"{step.samples} samples of {step.tokens // step.samples} tokens a step: "
        f"{step.microbatches} micro-batch{'es' * (step.microbatches > 1)} on each rank"
    )
    if memory_plan.idle:
        yield f"{memory_plan.idle} of {ranks} ranks idle: there is no sample for them in a step"


def _table(*rows: Sequence[str]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = (f"  {cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True))
        yield f"{first:<{widths[0]}}" + "".join(cells)


def _memory(title: str, peaks: Mapping[str, Held]) -> Iterator[str]:
    """Items as rows, phases as columns."""
    rows = []
    for item in dict.fromkeys(item for peak in peaks.values() for item in peak.items):
        sizes = [peak.items.get(item, 0) for peak in peaks.values()]
        rows.append([item, *(gib(size) if size else "-" for size in sizes)])
    together = ["together", *(gib(peak.bytes) for peak in peaks.values())]
    return _table([title, *peaks], *rows, together)


def _moved(memory_plan: MemoryPlan) -> Iterator[str]:
    for traffic in memory_plan.estimate.traffic:
        where = "between nodes" if crossing(traffic, memory_plan.topology) else "inside a node"
        yield (
            f"network per step: {traffic.collective} of {human(traffic.bytes)} of {traffic.what} "
            f"among {traffic.ranks} ranks {where}, {human(sent(traffic))} sent by each"
        )
    copies = memory_plan.estimate.copies
    if copies.up or copies.down:
        up, down = human(copies.up), human(copies.down)
        yield f"copies per step: {up} from its host to each GPU, {down} back"
    if copies.disk:
        yield f"copies per step: {human(copies.disk)} read and written by each rank on disk"


def _time(memory_plan: MemoryPlan) -> Iterator[str]:
    """By resource, and what comes of it."""
    time, speed, peak = memory_plan.time, memory_plan.speed, memory_plan.hardware.peak
    if time.parts:
        rows = [
            (part, f"{time.parts[part]:.3g}", f"{time.reached[part]:.3g}") for part in time.parts
        ]
        rows.append(("one step", f"{time.least:.3g}", f"{time.expected:.3g}"))
        origins = ["", *(memory_plan.hardware.rates[part].origin for part in time.parts), ""]
        table = _table(("time per step, s", "at least", "expected"), *rows)
        yield from (f"{row}  {origin}".rstrip() for row, origin in zip(table, origins, strict=True))
    if time.unknown:
        yield f"not in the time per step: {', '.join(time.unknown)}, whose rate is not given"
    if speed is not None:
        yield (
            f"expected: {speed.tokens_per_second:,.0f} tokens/s, "
            f"{speed.tokens_per_second / memory_plan.topology.ranks:,.0f} per rank"
            + (f", MFU {speed.mfu:.0%} of {peak / 1e12:.0f} TFLOP/s" if speed.mfu and peak else "")
        )
    if speed is not None and speed.hours is not None:
        cost = "" if speed.cost is None else f", at a cost of {speed.cost:,.2f}"
        steps = memory_plan.estimate.step.length.steps
        yield f"expected: {speed.hours:,.2f} hours for {steps:,} steps{cost}"


def gib(size: int) -> str:
    """GiB, with as many digits as mean something."""
    return f"{size / GIB:.{1 if size >= 0.1 * GIB else 2}f}"

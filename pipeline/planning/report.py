"""A plan for people: tables in GiB and seconds, and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.hardware.gpus import GIB
from pipeline.planning.forecast import Held
from pipeline.planning.memory_plan import MemoryPlan
from pipeline.planning.step_time import crossing, sent
from pipeline.utils.text import align, human, plural


def lines(memory_plan: MemoryPlan) -> Iterator[str]:
    """The verdict, then memory, disk, network, time, and what is not counted."""
    estimate, margins, topology = memory_plan.estimate, memory_plan.margins, memory_plan.topology
    words = {"device": "GPU", "host": "host"}
    short = ", ".join(f"a {words[place]} in {phase}" for place, phase in memory_plan.short.items())
    verdict = f"does not fit ({short})" if short else "fits"
    fits = f"{verdict}: {memory(memory_plan)}"
    yield "whether it fits: say --gpu or --memory" if memory_plan.fits is None else fits
    yield from _head(memory_plan)
    if memory_plan.training:
        yield f"this is the plan of `{memory_plan.training}`, the training that needs most"
    for other in memory_plan.others:
        yield f"`{other.training}`: {memory(other)}"
        for file in other.estimate.storage:
            yield f"`{other.training}`: {human(file.bytes)} of disk for {file.what}"
        yield from (f"`{other.training}`: {line}" for line in _duration(other))
    yield ""
    if topology.device != "cpu":
        yield from _memory("memory per GPU, GiB", estimate.device)
        yield (
            f"with {margins.fragmentation:.0%} lost between tensors and {gib(margins.overhead)} GiB"
            f" outside of them ({margins.source}): {gib(memory_plan.needed)} GiB"
        )
        yield from spare(memory_plan)
        yield ""
    yield from _memory("host memory per node, GiB", estimate.host)
    yield ""
    yield from (f"disk: {human(file.bytes)} for {file.what}" for file in estimate.storage)
    yield from (f"disk of a node: {human(n)} for {item}" for item, n in estimate.offloaded.items())
    for traffic in estimate.traffic:
        where = "between nodes" if crossing(traffic, topology) else "inside a node"
        yield (
            f"network per step: {traffic.collective} of {human(traffic.bytes)} of {traffic.what} "
            f"among {traffic.ranks} ranks {where}, {human(sent(traffic))} sent by each"
        )
    copies = estimate.copies
    if copies.up or copies.down:
        up, down = human(copies.up), human(copies.down)
        yield f"copies per step: {up} from its host to each GPU, {down} back"
    if copies.disk:
        yield f"copies per step: {human(copies.disk)} read and written by each rank on disk"
    yield from _time(memory_plan)
    yield from (f"not counted: {caveat}" for caveat in estimate.caveats)
    yield from (f"warning: {warning}" for warning in memory_plan.plan.warnings)


def memory(memory_plan: MemoryPlan) -> str:
    """GiB of a GPU and of a host, for people; an unknown host is a condition."""
    hardware = memory_plan.hardware
    host, hosts = gib(memory_plan.estimate.host_peak), hardware.host_memory
    on_host = f"{host} GiB of {gib(hosts)} a host" if hosts else f"if a host has {host} GiB"
    if memory_plan.topology.device == "cpu":
        return on_host
    there = f" of {gib(hardware.device_memory)}" if hardware.device_memory else ""
    return f"{gib(memory_plan.needed)} GiB{there} a GPU, {on_host}"


def spare(memory_plan: MemoryPlan) -> Iterator[str]:
    """Yield the free memory of a GPU, if the plan fits; with a warning where it is little."""
    left, known = memory_plan.left, memory_plan.hardware.device_memory
    if memory_plan.short or left is None or known is None:
        return
    free = f"{gib(left)} GiB of a GPU are left, {left / known:.0%}"
    share = memory_plan.margins.headroom
    little = f": it may not fit, as one training in three took over {share:.0%} more"
    yield free if memory_plan.roomy else free + little


def _head(memory_plan: MemoryPlan) -> Iterator[str]:
    topology, step = memory_plan.topology, memory_plan.estimate.step
    ranks, recipe, model = topology.ranks, memory_plan.plan.recipe, memory_plan.model
    written = recipe.launch.ranks
    device = "CPU process" if topology.device == "cpu" else memory_plan.hardware.kind or "GPU"
    yield f"{recipe.name} on {plural(topology.nodes, 'node')}, {ranks} x {device}"
    if written not in (None, ranks):
        said = plural(written, "process")
        yield f"the recipe says {said}; planned for {ranks}, as the options say"
    if memory_plan.wider:
        yield memory_plan.wider
    yield f"{model.parameters / 1e9:.3g} G parameters, {model.trained / 1e9:.3g} G of them trained"
    yield (
        f"{step.samples} samples of {step.tokens // step.samples} tokens a step: "
        f"{plural(step.microbatches, 'micro-batch')} on each rank"
    )
    if topology.data_ranks != ranks:
        yield f"{plural(topology.data_ranks, 'data-parallel rank')} divide the samples"
    if memory_plan.idle:
        yield f"{memory_plan.idle} of {ranks} ranks idle: there is no sample for them in a step"


def _memory(title: str, peaks: Mapping[str, Held]) -> Iterator[str]:
    rows = [[title, *peaks]]
    for item in dict.fromkeys(item for peak in peaks.values() for item in peak.items):
        sizes = [peak.items.get(item, 0) for peak in peaks.values()]
        rows.append([item, *(gib(size) if size else "-" for size in sizes)])
    return align([*rows, ["together", *(gib(peak.bytes) for peak in peaks.values())]])


def _time(memory_plan: MemoryPlan) -> Iterator[str]:
    time, speed, hardware = memory_plan.time, memory_plan.speed, memory_plan.hardware
    if time.parts:
        if time.idle:
            yield f"a rank waits for other stages of the pipeline in {time.idle:.0%} of a step"
        rows = [(name, f"{at:.3g}", f"{time.reached[name]:.3g}") for name, at in time.parts.items()]
        total = ("one step", f"{time.least:.3g}", f"{time.expected:.3g}")
        origins = ["", *(hardware.rates[part].origin for part in time.parts), ""]
        table = align([("time per step, s", "at least", "expected"), *rows, total])
        yield from (f"{row}  {origin}".rstrip() for row, origin in zip(table, origins, strict=True))
    if time.unknown:
        yield f"not in the time per step: {', '.join(time.unknown)}, whose rate is not given"
    if speed is not None:
        per_rank = speed.tokens_per_second / memory_plan.topology.ranks
        peak = f" of {hardware.peak / 1e12:.0f} TFLOP/s" if hardware.peak else ""
        mfu = f", MFU {speed.mfu:.0%}{peak}" if speed.mfu else ""
        yield f"expected: {speed.tokens_per_second:,.0f} tokens/s, {per_rank:,.0f} per rank{mfu}"
        yield from _duration(memory_plan)


def _duration(memory_plan: MemoryPlan) -> Iterator[str]:
    speed, steps = memory_plan.speed, memory_plan.estimate.step.length.steps
    if speed is not None and speed.hours is not None:
        cost = "" if speed.cost is None else f", at a cost of {speed.cost:,.2f}"
        yield f"expected: {speed.hours:,.2f} hours for {steps:,} steps{cost}"


def gib(size: int) -> str:
    """GiB, with as many digits as mean something."""
    return f"{size / GIB:.{1 if size >= 0.1 * GIB else 2}f}"

"""A forecast for people: tables in GiB, and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pipeline.accelerators import GIB
from pipeline.planning.estimate import Estimate
from pipeline.planning.hardware_spec import Hardware
from pipeline.planning.margins import Margins, Shortage
from pipeline.planning.rates import MEASURED, in_words, origins
from pipeline.planning.step_time import StepTime, crosses, sent
from pipeline.planning.strategy import Traffic
from pipeline.planning.timeline import Held
from pipeline.planning.topology import Topology
from pipeline.throughput import human


def lines(
    estimate: Estimate,
    topology: Topology,
    hardware: Hardware,
    margins: Margins,
    time: StepTime | None,
) -> Iterator[str]:
    """Everything but the verdict."""
    if topology.device == "cpu":
        yield from _table("memory of the fullest node, GiB", estimate.host)
    else:
        yield from _table("memory of the fullest GPU, GiB", estimate.device)
        yield from _beside(estimate, hardware, margins)
        yield ""
        yield from _table("host memory of the fullest node, GiB", estimate.host)
    yield ""
    yield from _disk(estimate)
    yield from _network(estimate, topology)
    yield from _time(time, estimate.traffic, topology, hardware)
    for caveat in (*estimate.caveats, *hardware.caveats):
        yield f"not counted: {caveat}"


def comparison(how: str, traced: Estimate, profiled: Estimate) -> Iterator[str]:
    """A trace beside what the profile says."""
    yield how
    apart = profiled.peak / traced.peak - 1
    yield f"without --trace: {gib(profiled.peak)} GiB at the peak of a rank: {apart:+.1%}"


def explanations(estimate: Estimate) -> Iterator[str]:
    """How each item comes about."""
    yield "how these come about"
    seen = [
        item
        for peaks in (estimate.device, estimate.host)
        for p in peaks.values()
        for item in p.items
    ]
    seen += list(estimate.disk)
    width = max(map(len, seen), default=0)
    for item in dict.fromkeys(seen):
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


def _beside(estimate: Estimate, hardware: Hardware, margins: Margins) -> Iterator[str]:
    needed = margins.of(estimate.peak)
    text = (
        f"with {margins.fragmentation:.0%} lost between tensors and {gib(margins.overhead)} GiB "
        f"beside them (assumed): {gib(needed)} GiB"
    )
    if hardware.device_memory is not None:
        text += f" of {gib(hardware.device_memory)}"
    yield text


def _disk(estimate: Estimate) -> Iterator[str]:
    for file in estimate.storage:
        yield f"disk: {human(file.bytes)} for {file.what} ({file.formula})"
    for item, size in estimate.disk.items():
        yield f"disk of a node: {human(size)} for {item}"


def _network(estimate: Estimate, topology: Topology) -> Iterator[str]:
    for traffic in estimate.traffic:
        where = "between nodes" if crosses(traffic, topology) else "inside a node"
        yield (
            f"a step: {traffic.collective} of {human(traffic.bytes)} of {traffic.what} among "
            f"{traffic.ranks} ranks {where}, {human(sent(traffic))} sent by each"
        )
    copies = estimate.copies
    if copies.up or copies.down:
        yield f"a step: {human(copies.up)} from its host to each GPU, {human(copies.down)} back"
    if copies.disk:
        yield f"a step: {human(copies.disk)} read and written by each rank on disk"


def _time(
    time: StepTime | None, traffic: Sequence[Traffic], topology: Topology, hardware: Hardware
) -> Iterator[str]:
    if time is None or not time.parts:
        return
    parts = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in time.parts.items())
    found = origins(time, traffic, topology, hardware)
    if list(found) == [MEASURED]:
        yield (
            f"a step: {time.most:.3g} s if nothing overlaps, {time.least:.3g} s, bound by "
            f"{time.bound}, if everything does ({parts}; {in_words(found)})"
        )
    else:
        yield (
            f"a step: at least {time.least:.3g} s, bound by {time.bound}; {time.most:.3g} s if "
            f"nothing overlapped ({parts}; {in_words(found)})"
        )
    if time.unknown:
        yield f"the step's time leaves out: {', '.join(time.unknown)}, whose rate is not given"


def verdict(
    short: Sequence[Shortage],
    estimate: Estimate,
    topology: Topology,
    hardware: Hardware,
    margins: Margins,
) -> str:
    """Whether it fits; a line for each shortage."""
    if short:
        return "\n".join(
            f"does not fit: {gib(s.needed)} GiB of {s.what} needed ({s.phase}), "
            f"{gib(s.there)} there"
            for s in short
        )
    if topology.device == "cpu" and hardware.host_memory is not None:
        return f"fits: {gib(estimate.host_peak)} GiB of {gib(hardware.host_memory)} host memory"
    if hardware.device_memory is None:
        return "whether it fits: say --gpu or --memory"
    left = hardware.device_memory - margins.of(estimate.peak)
    host = hardware.host_memory
    if host is None:
        beside = f"if each node has {gib(estimate.host_peak)} GiB of host memory (--host-memory)"
    else:
        beside = f"{gib(host - estimate.host_peak)} GiB of each host's memory"
    return f"fits: {gib(left)} GiB of each GPU to spare, {beside}"


def _cell(size: int) -> str:
    return gib(size) if size else "-"


def gib(size: int) -> str:
    """GiB, with as many digits as mean something."""
    value = size / GIB
    return f"{value:.1f}" if value >= 0.1 else f"{value:.2f}" if value >= 0.01 else "0.00"

"""A forecast for people: tables in GiB, and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline.accelerators import GIB
from pipeline.forecast.fit import Margins, Shortage
from pipeline.forecast.ledger import Peak
from pipeline.forecast.placement import Traffic
from pipeline.forecast.rates import MEASURED, in_words, origins
from pipeline.forecast.result import Forecast
from pipeline.forecast.site import Hardware, Site
from pipeline.forecast.timing import StepTime, crosses, sent
from pipeline.throughput import human

if TYPE_CHECKING:
    from pipeline.tracing.measured import Measured


def lines(
    forecast: Forecast,
    site: Site,
    hardware: Hardware,
    margins: Margins,
    time: StepTime | None,
) -> Iterator[str]:
    """Everything but the verdict."""
    if site.device == "cpu":
        yield from _table("memory of the fullest node, GiB", forecast.host)
    else:
        yield from _table("memory of the fullest GPU, GiB", forecast.device)
        yield from _beside(forecast, hardware, margins)
        yield ""
        yield from _table("host memory of the fullest node, GiB", forecast.host)
    yield ""
    yield from _disk(forecast)
    yield from _network(forecast, site)
    yield from _time(time, forecast.traffic, site, hardware)
    for caveat in (*forecast.caveats, *hardware.caveats):
        yield f"not counted: {caveat}"


def comparison(how: str, forecast: Forecast, arithmetic: Forecast | None) -> Iterator[str]:
    """A trace beside arithmetic."""
    yield how
    if arithmetic is None:
        yield "there is no arithmetic for this model to compare with"
        return
    apart = arithmetic.peak / forecast.peak - 1
    yield f"arithmetic alone says {gib(arithmetic.peak)} GiB at the peak of a rank: {apart:+.1%}"


def measurement(forecast: Forecast, measured: Measured) -> Iterator[str]:
    """What was measured beside what was told."""
    where = "GPU" if measured.device == "cuda" else "CPU process"
    yield f"measured here on {measured.ranks} x {where}, GiB"
    yield f"  {'':<16}  predicted  measured"
    for phase, size in measured.peaks.items():
        if phase in forecast.device and size:
            told = forecast.device[phase].bytes
            cells = f"{gib(told):>9}  {gib(size):>8}  {size / told - 1:+.1%}"
            yield f"  {phase:<16}  {cells}"


def explanations(forecast: Forecast) -> Iterator[str]:
    """How each item comes about."""
    yield "how these come about"
    seen = [
        item
        for peaks in (forecast.device, forecast.host)
        for p in peaks.values()
        for item in p.items
    ]
    seen += list(forecast.disk)
    width = max(map(len, seen), default=0)
    for item in dict.fromkeys(seen):
        yield f"  {item:<{width}}  {forecast.formulas.get(item, '')}".rstrip()


def _table(title: str, peaks: Mapping[str, Peak]) -> Iterator[str]:
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


def _beside(forecast: Forecast, hardware: Hardware, margins: Margins) -> Iterator[str]:
    needed = margins.of(forecast.peak)
    text = (
        f"with {margins.fragmentation:.0%} lost between tensors and {gib(margins.overhead)} GiB "
        f"beside them (assumed): {gib(needed)} GiB"
    )
    if hardware.device_memory is not None:
        text += f" of {gib(hardware.device_memory)}"
    yield text


def _disk(forecast: Forecast) -> Iterator[str]:
    for file in forecast.storage:
        yield f"disk: {human(file.bytes)} for {file.what} ({file.formula})"
    for item, size in forecast.disk.items():
        yield f"disk of a node: {human(size)} for {item}"


def _network(forecast: Forecast, site: Site) -> Iterator[str]:
    for traffic in forecast.traffic:
        where = "between nodes" if crosses(traffic, site) else "inside a node"
        yield (
            f"a step: {traffic.collective} of {human(traffic.bytes)} of {traffic.what} among "
            f"{traffic.ranks} ranks {where}, {human(sent(traffic))} sent by each"
        )
    copies = forecast.copies
    if copies.up or copies.down:
        yield f"a step: {human(copies.up)} from its host to each GPU, {human(copies.down)} back"
    if copies.disk:
        yield f"a step: {human(copies.disk)} read and written by each rank on disk"


def _time(
    time: StepTime | None, traffic: Sequence[Traffic], site: Site, hardware: Hardware
) -> Iterator[str]:
    if time is None or not time.parts:
        return
    parts = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in time.parts.items())
    found = origins(time, traffic, site, hardware)
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
    short: Sequence[Shortage], forecast: Forecast, site: Site, hardware: Hardware, margins: Margins
) -> str:
    """Whether it fits; a line for each shortage."""
    if short:
        return "\n".join(
            f"does not fit: {gib(s.needed)} GiB of {s.what} needed ({s.phase}), "
            f"{gib(s.there)} there"
            for s in short
        )
    if site.device == "cpu" and hardware.host_memory is not None:
        return f"fits: {gib(forecast.host_peak)} GiB of {gib(hardware.host_memory)} host memory"
    if hardware.device_memory is None:
        return "whether it fits: say --gpu or --memory"
    left = hardware.device_memory - margins.of(forecast.peak)
    host = hardware.host_memory
    if host is None:
        beside = f"if each node has {gib(forecast.host_peak)} GiB of host memory (--host-memory)"
    else:
        beside = f"{gib(host - forecast.host_peak)} GiB of each host's memory"
    return f"fits: {gib(left)} GiB of each GPU to spare, {beside}"


def _cell(size: int) -> str:
    return gib(size) if size else "-"


def gib(size: int) -> str:
    """GiB, with as many digits as mean something."""
    value = size / GIB
    return f"{value:.1f}" if value >= 0.1 else f"{value:.2f}" if value >= 0.01 else "0.00"

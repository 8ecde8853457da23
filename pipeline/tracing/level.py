"""A forecast made of a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline.artifacts import Data, ModelSource
from pipeline.errors import StageError, UsageError
from pipeline.forecast.chain import METHOD, ask, assemble
from pipeline.forecast.ledger import Ledger, Peak
from pipeline.forecast.result import Forecast
from pipeline.forecast.shapes import SampleShape
from pipeline.forecast.site import Site
from pipeline.plan import Plan
from pipeline.tracing.extrapolate import extrapolated, highest
from pipeline.tracing.meter import REST
from pipeline.tracing.outlined import outlined
from pipeline.tracing.run import run, sources
from pipeline.tracing.structure import Structure, depths, structure

CPU_KERNELS = (
    "kernels of GPUs that keep or take other tensors than those of CPUs, which were traced"
)


@dataclass(frozen=True, kw_only=True)
class TracedForecast:
    """What was traced, beside what arithmetic says."""

    forecast: Forecast
    told: Mapping[str, Any]
    """Slot -> what its stage has told."""
    how: str
    """Which parts were traced, for people."""
    arithmetic: Forecast | None
    """None for a model that it does not know."""


def traced_forecast(plan: Plan, site: Site) -> TracedForecast:
    """What the recipe needs at that site, its device memory by a trace. Raises what stages raise,
    and UsageError for a recipe that trains nothing."""
    samples = _samples(plan, site)
    models = sources(plan, site, samples)
    if not models:
        raise UsageError("nothing can be traced: no slot of the recipe gives a model")
    built = structure([*models.values()][-1])
    peaks, how = _peaks(plan, site, samples, built)
    arithmetic, told = _arithmetic(plan, site, models, built)
    caveats = (*(arithmetic or assemble(plan, site, told)).caveats,)
    metered = Site(
        ranks=site.ranks,
        local_ranks=site.local_ranks,
        device=site.device,
        ledger=_ledger(site, peaks),
    )
    forecast = assemble(plan, metered, told)
    if site.device != "cpu":
        caveats += (CPU_KERNELS,)
    return TracedForecast(
        forecast=replace(forecast, caveats=caveats), told=told, how=how, arithmetic=arithmetic
    )


def _samples(plan: Plan, site: Site) -> SampleShape:
    for step in plan.steps:
        if issubclass(step.gives or object, Data) and hasattr(step.stage, METHOD):
            shape: SampleShape = step.stage.forecast(site)
            return shape
    raise UsageError("nothing can be traced: no slot of the recipe tells the length of its samples")


def _peaks(
    plan: Plan, site: Site, samples: SampleShape, built: Structure
) -> tuple[dict[str, Peak], str]:
    """Phase -> peak, and how that was found."""
    count = len(built.blocks)
    pair = depths(built.signatures)
    if pair is not None:
        shallow, deeper = (run(plan, site, samples, blocks=depth).trace for depth in pair)
        if (shallow.blocks, deeper.blocks) == pair:
            found = extrapolated(shallow, deeper, count)
            return highest(found), f"with {pair[0]} and {pair[1]} of {count} blocks"
    whole = run(plan, site, samples).trace.moments
    return highest((phase, peak) for (phase, _, _), peak in whole.items()), "in full depth"


def _arithmetic(
    plan: Plan, site: Site, models: Mapping[str, ModelSource], built: Structure
) -> tuple[Forecast | None, dict[str, Any]]:
    """The forecast without a trace, and what stages tell; of a model that only a trace knows, by
    the shapes of its weights."""
    try:
        told = ask(plan, site)
        return assemble(plan, site, told), told
    except StageError:
        *before, last = models.items()
        shapes = {slot: outlined(source, structure(source)) for slot, source in before}
        shapes[last[0]] = outlined(last[1], built)
        return None, ask(plan, site, shapes)


def _ledger(site: Site, peaks: Mapping[str, Peak]) -> Ledger:
    """That has these peaks."""
    ledger = Ledger(formulas=dict(site.ledger.formulas))
    ledger.explain(REST, "metered: what is no parameter, gradient or state of the optimizer")
    for phase, peak in peaks.items():
        ledger.phase(phase)
        for item, size in peak.items.items():
            ledger.change(item, size)
        for item, size in peak.items.items():
            ledger.change(item, -size)
    return ledger

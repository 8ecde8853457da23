"""A forecast made of a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.artifacts import ModelSource, Precision
from pipeline.errors import StageError, UsageError
from pipeline.forecast.chain import ask, assemble, latest
from pipeline.forecast.ledger import Ledger, Peak
from pipeline.forecast.placement import Placement
from pipeline.forecast.result import Forecast, Step
from pipeline.forecast.shapes import ModelShape, SampleShape
from pipeline.forecast.site import Site
from pipeline.forecast.sizes import BYTES
from pipeline.plan import Plan
from pipeline.tracing.extrapolate import extrapolated, highest
from pipeline.tracing.meter import REST
from pipeline.tracing.outlined import outlined
from pipeline.tracing.replay import Replay, kinds
from pipeline.tracing.run import Traced, run, samples_of, sources
from pipeline.tracing.structure import Structure, depths, structure
from pipeline.tracing.training import training

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
    training(plan)  # before anything is built
    samples = samples_of(plan, site)
    models = sources(plan, site, samples)
    if not models:
        raise UsageError("nothing can be traced: no slot of the recipe gives a model")
    built = structure([*models.values()][-1])
    arithmetic, told = _arithmetic(plan, site, models, built)
    placement = latest(told, Placement)
    pair = depths(built.signatures, placement.reach if placement else 1)
    found = _run(plan, site, samples, pair)
    if found[-1].alone is None:
        forecast = _of_peaks(plan, site, told, _peaks(found, len(built.blocks)))
        how = f"model and strategy were traced, {_depth(found, built)}"
    else:
        shapes = _shapes(models, built)
        period = pair[1] - pair[0] if pair else 1
        forecast, told = _of_replay(plan, site, told, shapes, built, found[0], period)
        how = f"activations and logits were traced, {_depth(found, built)}; what the strategy "
        how += "holds was computed"
    caveats = forecast.caveats if site.device == "cpu" else (*forecast.caveats, CPU_KERNELS)
    return TracedForecast(
        forecast=replace(forecast, caveats=caveats), told=told, how=how, arithmetic=arithmetic
    )


def _of_peaks(
    plan: Plan, site: Site, told: Mapping[str, Any], peaks: Mapping[str, Peak]
) -> Forecast:
    ledger = Ledger(formulas=dict(site.ledger.formulas))
    ledger.explain(REST, "metered: what is no parameter, gradient or state of the optimizer")
    for phase, peak in peaks.items():
        ledger.phase(phase)
        for item, size in peak.items.items():
            ledger.change(item, size)
        for item, size in peak.items.items():
            ledger.change(item, -size)
    return assemble(plan, replace(site, ledger=ledger), told)


def _of_replay(
    plan: Plan,
    site: Site,
    told: Mapping[str, Any],
    shapes: Mapping[str, ModelShape],
    built: Structure,
    found: Traced,
    period: int,
) -> tuple[Forecast, dict[str, Any]]:
    """By the placement's arithmetic. Raises UsageError for a strategy without."""
    step, precision = latest(told, Step), latest(told, Precision)
    counted = {slot: one for slot, one in told.items() if isinstance(one, Step)}
    fresh = replace(site, ledger=Ledger())
    told = ask(plan, fresh, {**shapes, **counted})
    model, placement = latest(told, ModelShape), latest(told, Placement)
    if step is None or precision is None or model is None or placement is None:
        return assemble(plan, fresh, told), told  # which says what is missing
    assert found.alone is not None
    alike = list(kinds(len(built.blocks), found.trace.blocks, period))
    replay = Replay(model, placement, found.alone, found.built, alike, BYTES[precision.compute])
    replay.tell(min(step.microbatches, 3))
    return assemble(plan, fresh, told), told


def _run(
    plan: Plan, site: Site, samples: SampleShape, pair: tuple[int, int] | None
) -> list[Traced]:
    """Of two depths from which the whole follows, or of the whole model."""
    if pair is not None:
        shallow = run(plan, site, samples, blocks=pair[0])
        if shallow.alone:
            return [shallow]
        if shallow.trace.blocks == pair[0]:
            return [shallow, run(plan, site, samples, blocks=pair[1])]
    return [run(plan, site, samples)]


def _peaks(found: Sequence[Traced], blocks: int) -> dict[str, Peak]:
    """Phase -> peak."""
    if len(found) > 1:
        return highest(extrapolated(found[0].trace, found[1].trace, blocks))
    moments = found[0].trace.moments
    return highest((phase, peak) for (phase, _, _), peak in moments.items())


def _depth(found: Sequence[Traced], built: Structure) -> str:
    depths_ = " and ".join(str(one.trace.blocks) for one in found)
    return f"with {depths_} of {len(built.blocks)} blocks"


def _arithmetic(
    plan: Plan, site: Site, models: Mapping[str, ModelSource], built: Structure
) -> tuple[Forecast | None, dict[str, Any]]:
    """The forecast without a trace, and what stages tell; of a model that only a trace knows, by
    the shapes of its weights."""
    try:
        told = ask(plan, site)
        return assemble(plan, site, told), told
    except StageError:
        told = ask(plan, site, _shapes(models, built))
        assemble(plan, site, told)  # which says what else is missing
        return None, told


def _shapes(models: Mapping[str, ModelSource], built: Structure) -> dict[str, ModelShape]:
    """Slot -> the shapes of its model's weights; `built` is the last one's."""
    *before, (slot, source) = models.items()
    shapes = {other: outlined(one, structure(one)) for other, one in before}
    return {**shapes, slot: outlined(source, built)}

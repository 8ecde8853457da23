"""Ask a recipe's stages, in order, for what they will need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pipeline.accelerators import GIB
from pipeline.artifacts import Data, ModelSource, OptimizerPlan, Precision, TrainedRun
from pipeline.engine import Engine
from pipeline.errors import UsageError
from pipeline.forecast.ledger import Peak, Place
from pipeline.forecast.phases import LOAD
from pipeline.forecast.placement import Copies, Placement
from pipeline.forecast.result import Extras, Forecast, Host, Step
from pipeline.forecast.shapes import ModelShape, OptimizerShape, SampleShape
from pipeline.forecast.site import PROCESS, Site
from pipeline.plan import Plan
from pipeline.plan import Step as Slot
from pipeline.signature import Need, needs

T = TypeVar("T")

METHOD = "forecast"
PROCESSES = "processes"
TELLS: Mapping[type, type] = {
    ModelSource: ModelShape,
    Data: SampleShape,
    Precision: Precision,
    OptimizerPlan: OptimizerShape,
    Engine: Placement,
    TrainedRun: Step,
}
"""A type that a stage gives -> what its forecast tells, without which a training has none."""


def forecast(plan: Plan, site: Site) -> Forecast:
    """What the recipe needs at that site; errors as of `ask` and `assemble`."""
    return assemble(plan, site, ask(plan, site))


def assemble(plan: Plan, site: Site, told: Mapping[str, Any]) -> Forecast:
    """Put together what stages have told. Raises UsageError when one that matters did not."""
    step = latest(told, Step)
    placement = latest(told, Placement)
    if step is None or placement is None:
        mute = [f"{slot.slot}: {slot.use}" for slot in _mute(plan, told)]
        raise UsageError(
            f"what this recipe needs cannot be told: {', '.join(mute) or 'nothing is trained'}",
            hint="without a forecast, which others build on" if mute else "give it a train slot",
        )
    extras = list(each(told, Extras))
    return Forecast(
        device=site.ledger.peaks("device"),
        host=_host(site, [need for extra in extras for need in extra.host]),
        disk={item: size * site.local_ranks for item, size in site.ledger.held("disk").items()},
        storage=[file for extra in extras for file in extra.files(step.length)],
        formulas=site.ledger.formulas,
        traffic=list(placement.traffic(step.microbatches)),
        copies=_copies(site, placement.copies(step.microbatches) + step.copies),
        step=step,
        caveats=tuple(_caveats(plan, told)),
    )


def ask(plan: Plan, site: Site, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Slot -> what its stage told; slots of which something is `known` are not asked. Raises
    StageError for a model whose sizes cannot be told."""
    told: dict[str, Any] = {}
    for step in plan.steps:
        if known and step.slot in known:
            told[step.slot] = known[step.slot]
        elif hasattr(step.stage, METHOD) and not any(_missing(step.stage, told)):
            asked = _asked(step.stage)
            inputs = {need.parameter: latest(told, need.type) for need in asked}
            told[step.slot] = step.stage.forecast(site, **inputs)
    return told


def latest(told: Mapping[str, Any], kind: type[T]) -> T | None:
    """What the latest slot has told that told something of this kind."""
    return next(reversed([*each(told, kind)]), None)


def each(told: Mapping[str, Any], kind: type[T]) -> Iterator[T]:
    """Everything of this kind, in the order of slots."""
    for one in told.values():
        for part in one if isinstance(one, tuple) else (one,):
            if isinstance(part, kind):
                yield part


def _missing(stage: Any, told: Mapping[str, Any]) -> Iterator[str]:
    """What its forecast cannot do without, and no slot has told."""
    for need in _asked(stage):
        if not need.optional and latest(told, need.type) is None:
            yield need.type.__name__


def _asked(stage: Any) -> tuple[Need, ...]:
    kind: type = type(stage)
    return needs(kind, METHOD)


def _mute(plan: Plan, told: Mapping[str, Any]) -> Iterator[Slot]:
    """The slots without a forecast of which nobody else tells what others build on."""
    for slot in plan.steps:
        meant = [TELLS[kind] for kind in TELLS if issubclass(slot.gives or object, kind)]
        if not hasattr(slot.stage, METHOD) and any(latest(told, each) is None for each in meant):
            yield slot


def _caveats(plan: Plan, told: Mapping[str, Any]) -> Iterator[str]:
    """What is left out of account: whole slots, and what stages say of themselves."""
    before: dict[str, Any] = {}
    for step in plan.steps:
        if step.slot in told:
            before[step.slot] = told[step.slot]
        elif not hasattr(step.stage, METHOD):
            yield f"slot `{step.slot}` ({step.use}) has no forecast"
        else:
            missing = ", ".join(_missing(step.stage, before))
            yield f"slot `{step.slot}` ({step.use}) needs what no slot before it tells: {missing}"
    model = latest(told, ModelShape)
    if model is not None:
        yield from model.caveats
        yield from _beyond(model, latest(told, SampleShape))
    for extra in each(told, Extras):
        yield from extra.caveats


def _beyond(model: ModelShape, data: SampleShape | None) -> Iterator[str]:
    """Samples that are longer than what the model is made for."""
    if model.context is None or data is None or data.length <= model.context:
        return
    apart = " (of documents that may be shorter)" if data.packed else ""
    yield (
        f"what becomes of positions beyond the {model.context} of the model's config: samples have "
        f"{data.length} tokens{apart}"
    )


def _copies(site: Site, copies: Copies) -> Copies:
    """A CPU computes in its host's memory."""
    return replace(copies, up=0, down=0) if site.device == "cpu" else copies


def _host(site: Site, extra: Sequence[Host]) -> dict[str, Peak]:
    """Of one node: what its ranks hold, their libraries, and what stages take beside that."""
    ranks = min(site.local_ranks, site.ranks)
    site.ledger.explain(PROCESSES, f"{PROCESS / GIB:.1f} GiB a process, as measured on CPUs")
    places: tuple[Place, ...] = ("host", "device") if site.device == "cpu" else ("host",)
    held = site.ledger.peaks(*places)
    phases = {
        phase: {PROCESSES: PROCESS * ranks}
        | {item: size * ranks for item, size in peak.items.items()}
        for phase, peak in held.items()
    }
    for need in extra:
        site.ledger.explain(need.what, need.formula)
        for phase in [need.phase] if need.phase else [each for each in held if each != LOAD]:
            items = phases.setdefault(phase, {PROCESSES: PROCESS * ranks})
            items[need.what] = items.get(need.what, 0) + need.bytes
    return {p: Peak(bytes=sum(items.values()), items=items) for p, items in phases.items()}

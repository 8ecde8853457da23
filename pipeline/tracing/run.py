"""A recipe's stages, run as far as training steps."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from pipeline.artifacts import Data, ModelSource, OptimizerPlan, Precision
from pipeline.dist import Dist
from pipeline.engine import Engine
from pipeline.errors import UsageError
from pipeline.forecast.chain import METHOD as FORECAST
from pipeline.forecast.chain import latest
from pipeline.forecast.shapes import SampleShape
from pipeline.forecast.site import Site
from pipeline.plan import Plan
from pipeline.signature import needs
from pipeline.tracing.alone import Alone
from pipeline.tracing.extrapolate import Trace, highest
from pipeline.tracing.fake_compat import told_apart
from pipeline.tracing.gpu import GpuSession
from pipeline.tracing.replay import Pieces, pieces
from pipeline.tracing.session import Owners, Session, context, session
from pipeline.tracing.structure import Structure, structure
from pipeline.tracing.training import METHOD, training
from pipeline.tracing.unread import unread
from pipeline.tracing.watch import Depth

DECLARATIONS = (ModelSource, Precision, OptimizerPlan)


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A model that was run, and what it is."""

    trace: Trace
    built: Structure
    """Of as many blocks as were run."""
    alone: Pieces | None
    """What was metered of the model alone, where its strategy cannot be traced."""


def sources(plan: Plan, site: Site, samples: SampleShape) -> dict[str, ModelSource]:
    """Slot -> the model that it declares, in full depth."""
    with session(site, seed=plan.view.seed) as here:
        told = _Told(plan, site, samples, Depth(), here)
        told.declare()
        return {slot: one for slot, one in told.items() if isinstance(one, ModelSource)}


def run(
    plan: Plan,
    site: Site,
    samples: SampleShape,
    *,
    blocks: int | None = None,
    fake: bool = True,
    alone: bool = False,
) -> Traced:
    """Two training steps of rank 0, on a model of its first so many blocks. Without `fake`, on real
    tensors, by the engines that train; with `alone`, without the strategy. Raises UsageError where
    nothing is trained, and StageError where values are needed."""
    with session(site, seed=plan.view.seed, fake=fake) as here:
        told = _Told(plan, site, samples, Depth(blocks=blocks), here)
        source = told.declare()
        # By name: a strategy may change their classes.
        built = structure(source)
        told["unread"] = unread(source)
        with told_apart(), here.metering():
            told.wrap(None if alone else METHOD if fake else "run")
            told.train(built.names)
    return Traced(
        trace=Trace(blocks=len(built.blocks), moments=here.meter.moments),
        built=built,
        alone=pieces(here.meter, told.alone.names) if told.alone else None,
    )


def measure(
    plan: Plan, site: Site, samples: SampleShape, place: Dist, folder: Path
) -> dict[str, int]:
    """Phase -> peak in bytes of this rank, of two steps of the real engine (collective)."""
    with contextlib.ExitStack() as stack:
        ctx = context(folder, place, plan.view.seed, stack.callback)
        here = GpuSession(ctx) if place.device.type == "cuda" else Session(ctx, fake=False)
        told = _Told(plan, site, samples, Depth(), here)
        source = told.declare()
        told["unread"] = unread(source)
        with here.metering():
            told.wrap("run")
            told.train(structure(source).names)
        if isinstance(here, GpuSession):
            return here.watch.peaks
        moments = here.meter.moments
        found = highest((phase, peak) for (phase, _, _), peak in moments.items())
        return {phase: peak.bytes for phase, peak in found.items()}


def samples_of(plan: Plan, site: Site) -> SampleShape:
    """What the data slot tells of its samples. Raises UsageError where none does."""
    for step in plan.steps:
        if issubclass(step.gives or object, Data) and hasattr(step.stage, FORECAST):
            shape: SampleShape = step.stage.forecast(site)
            return shape
    raise UsageError("nothing can be traced: no slot of the recipe tells the length of its samples")


class _Told(dict[str, Any]):
    """What stages have given, by slot."""

    alone: Alone | None = None
    """The model, if its strategy left it alone."""

    def __init__(
        self,
        plan: Plan,
        site: Site,
        samples: SampleShape,
        depth: Depth,
        here: Session | GpuSession,
    ) -> None:
        self._watch = here.watch
        super().__init__({"site": site, "samples": samples, "depth": depth, "watch": self._watch})
        self._plan = plan
        self._site = site
        self._here = here

    def declare(self) -> ModelSource:
        """Stages that give declarations, whose tensors are real; the model. Raises UsageError
        where none is declared."""
        for step in self._plan.steps:
            if issubclass(step.gives or object, DECLARATIONS):
                method = METHOD if hasattr(step.stage, METHOD) else "run"
                self[step.slot] = self._call(step.stage, method)
        source = latest(self, ModelSource)
        if source is None:
            raise UsageError("nothing can be traced: no slot of the recipe gives a model")
        return source

    def wrap(self, method: str | None) -> None:
        """Stages that give an engine, by this method. Raises UsageError where none does."""
        for step in self._plan.steps:
            if not issubclass(step.gives or object, Engine):
                continue
            engine = None
            if method is not None and hasattr(step.stage, method):
                engine = self._call(step.stage, method)
            self[step.slot] = engine or latest(self, Engine) or self._bare()
        if latest(self, Engine) is None:
            raise UsageError("nothing can be traced: no slot of the recipe gives an engine")

    def _bare(self) -> Alone:
        source, precision = latest(self, ModelSource), latest(self, Precision)
        assert source is not None
        if precision is None:
            raise UsageError("nothing can be traced: no slot of the recipe gives a precision")
        assert isinstance(self._watch, Owners)
        self.alone = Alone(source, precision, self._site, self._watch)
        return self.alone

    def train(self, names: Sequence[str]) -> None:
        """The stage that trains; these modules are the model's blocks."""
        engine = latest(self, Engine)
        assert engine is not None
        blocks = [_within(engine.model, name) for name in names]
        self._watch.loaded(engine.model)
        with self._watch.watching(blocks):
            for step in training(self._plan):
                self._call(step.stage, METHOD)

    def _call(self, stage: Any, method: str) -> Any:
        kind: type = type(stage)
        asked = {need.parameter: need for need in needs(kind, method)}
        found = {name: latest(self, need.type) for name, need in asked.items()}
        missing = [n for n, need in asked.items() if found[n] is None and not need.optional]
        if missing:
            raise UsageError(f"{type(stage).__name__} cannot be traced without {missing[0]}")
        return getattr(stage, method)(self._here.ctx, **found)


def _within(model: nn.Module, name: str) -> nn.Module:
    """The module of that name in a model, which a strategy may have put into another one."""
    named: dict[str, nn.Module] = dict(model.named_modules())
    return next(one for found, one in named.items() if f".{found}".endswith(f".{name}"))

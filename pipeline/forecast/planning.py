"""A recipe, machines, and what comes of them together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.artifacts import Precision
from pipeline.forecast import table
from pipeline.forecast.chain import ask, assemble, latest
from pipeline.forecast.fit import Margins, Shortage, shortages
from pipeline.forecast.hardware import Asked, hardware_of, site_of
from pipeline.forecast.result import Forecast
from pipeline.forecast.saved import VERSION, identity
from pipeline.forecast.shapes import ModelShape
from pipeline.forecast.site import Hardware, Site
from pipeline.forecast.timing import StepTime, step_time
from pipeline.plan import Plan, plan_file
from pipeline.registry import Registry

if TYPE_CHECKING:
    from pipeline.tracing.level import TracedForecast
    from pipeline.tracing.measured import Measured


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A plan of memory and time."""

    plan: Plan
    site: Site
    hardware: Hardware
    margins: Margins
    forecast: Forecast
    model: ModelShape | None
    trace: TracedForecast | None = None
    """Where device memory was traced."""
    measured: Measured | None = None
    """Where steps were made here."""

    @property
    def short(self) -> Sequence[Shortage]:
        """What does not fit."""
        return list(shortages(self.forecast, self.site, self.hardware, self.margins))

    @property
    def fits(self) -> bool | None:
        """False where anything is short; else None where the device's memory is not known."""
        if self.short:
            return False
        on_cpu = self.site.device == "cpu"
        known = self.hardware.host_memory if on_cpu else self.hardware.device_memory
        return None if known is None else True

    @property
    def idle(self) -> int:
        """Ranks without a sample in any step."""
        step = self.forecast.step
        return 0 if step is None else max(self.site.ranks - step.samples, 0)

    @property
    def time(self) -> StepTime | None:
        """Of a step."""
        return step_time(self.forecast, self.site, self.hardware)

    def lines(self, *, explain: bool) -> Iterator[str]:
        """For people."""
        yield from self._head()
        yield ""
        yield from table.lines(self.forecast, self.site, self.hardware, self.margins, self.time)
        if self.trace is not None:
            yield from table.comparison(self.trace.how, self.forecast, self.trace.arithmetic)
        if self.measured is not None:
            yield ""
            yield from table.measurement(self.forecast, self.measured)
        if explain:
            yield ""
            yield from table.explanations(self.forecast)
        yield ""
        yield table.verdict(self.short, self.forecast, self.site, self.hardware, self.margins)

    def _head(self) -> Iterator[str]:
        site, step = self.site, self.forecast.step
        device = "CPU process" if site.device == "cpu" else self.hardware.kind or "GPU"
        nodes = f"{site.nodes} node{'s' * (site.nodes > 1)}"
        yield f"{self.plan.recipe.name} on {nodes}, {site.ranks} x {device}"
        written = self.plan.recipe.launch.procs
        if written is not None and written != site.ranks:
            yield f"the recipe says {written} processes; planned for {site.ranks}, as asked"
        if self.model is not None:
            parameters, trained = self.model.parameters, self.model.trained
            yield f"{parameters / 1e9:.3g} G parameters, {trained / 1e9:.3g} G of them trained"
        if step is not None:
            yield (
                f"{step.samples} samples of {step.tokens // step.samples} tokens a step: "
                f"{step.microbatches} micro-batch{'es' * (step.microbatches > 1)} on each rank"
            )
        if self.idle:
            yield (f"{self.idle} of {site.ranks} ranks idle: there is no sample for them in a step")

    def record(self) -> dict[str, Any]:
        """JSON. Bytes and seconds."""
        time = self.time
        return {
            "schema_version": VERSION,
            "name": self.plan.recipe.name,
            "identity": identity(self.plan, self.site.local_ranks).model_dump(),
            "level": "arithmetic" if self.trace is None else "trace",
            "measured": None if self.measured is None else asdict(self.measured),
            "traced": None if self.trace is None else self.trace.how,
            "ranks": self.site.ranks,
            "idle_ranks": self.idle,
            "nodes": self.site.nodes,
            "computes_on": self.site.device,
            "hardware": asdict(self.hardware),
            "margins": asdict(self.margins),
            "device": {phase: asdict(peak) for phase, peak in self.forecast.device.items()},
            "host": {phase: asdict(peak) for phase, peak in self.forecast.host.items()},
            "offloaded": dict(self.forecast.disk),
            "storage": [asdict(file) for file in self.forecast.storage],
            "traffic": [asdict(traffic) for traffic in self.forecast.traffic],
            "copies": asdict(self.forecast.copies),
            "step": asdict(self.forecast.step) if self.forecast.step else None,
            "seconds": None if time is None else _seconds(time),
            "formulas": dict(self.forecast.formulas),
            "caveats": [*self.forecast.caveats, *self.hardware.caveats],
            "fits": self.fits,
            "short": [asdict(short) for short in self.short],
        }


def _seconds(time: StepTime) -> dict[str, Any]:
    return asdict(time) | {"least": time.least, "most": time.most, "bound": time.bound}


def draw_up(
    recipe: Path,
    overrides: Sequence[str],
    asked: Asked,
    margins: Margins,
    registry: Registry | None = None,
    *,
    trace: bool = False,
    measure: bool = False,
) -> Drawn:
    """Check the recipe, and ask its stages, or trace them; `measure` makes steps here too. Raises
    RecipeError, UsageError, StageError and RunFailed."""
    # The recipe's device gives way to options; one that is said beside them contradicts them.
    lines = [*asked.overrides, *overrides]
    plan = plan_file(recipe, lines, registry=registry, forecast=True, procs=asked.procs)
    drawn = draw_up_plan(plan, asked, margins, trace=trace)
    if not measure:
        return drawn
    from pipeline.tracing.measured import measure_here

    return replace(drawn, measured=measure_here(plan, drawn.forecast))


def draw_up_plan(plan: Plan, asked: Asked, margins: Margins, *, trace: bool = False) -> Drawn:
    """The same for a recipe that has been checked."""
    site = site_of(asked, plan.view.procs, plan.view.device)
    traced = None
    if trace:
        from pipeline.tracing.level import traced_forecast

        traced = traced_forecast(plan, site)
    told = ask(plan, site) if traced is None else traced.told
    policy = latest(told, Precision)
    compute = policy.compute if policy else "fp32"
    return Drawn(
        plan=plan,
        site=site,
        hardware=hardware_of(asked, site, compute=compute),
        margins=margins,
        forecast=assemble(plan, site, told) if traced is None else traced.forecast,
        model=latest(told, ModelShape),
        trace=traced,
    )

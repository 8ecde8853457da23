"""Small stages for tests of recipes and plans; registered by the `registry` fixture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.contracts.data import Data
from pipeline.contracts.engine import Engine
from pipeline.contracts.model import ModelSource
from pipeline.contracts.optimizer import OptimizerPlan
from pipeline.contracts.plan_view import PlanView
from pipeline.contracts.stage import Context, ResourceNeed
from pipeline.contracts.training import Checkpoints, TrainedRun
from pipeline.errors import Problem
from pipeline.planning.planner import Planner, Preset, Presets, Trial


class RedEngine(Engine):
    """One strategy's engine."""


class BlueEngine(Engine):
    """Another strategy's engine."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Declare a model.

    More words that a list of stages leaves out.
    """

    path: Path | None = None
    """Where it is."""
    layers: Annotated[int, Field(ge=1, le=100)] = 2
    """How many."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        if self.path is not None and not self.path.exists():
            yield Problem(message=f"no such file: {self.path}", key="path")

    def run(self, ctx: Context) -> ModelSource:
        raise AssertionError("never run")


@dataclass(frozen=True, kw_only=True)
class TextFiles:
    """Declare data."""

    files: tuple[Path, ...]
    """Files to read."""
    length: Annotated[int, Field(ge=1)] = 8
    """Tokens in a block."""
    note: str = ""
    """Anything."""
    split: Literal["none", "heldout"] = "none"
    """Part to keep back."""

    def run(self, ctx: Context, model: ModelSource) -> Data:
        raise AssertionError("never run")


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Declare an optimizer."""

    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Averaging factors."""

    def run(self, ctx: Context, model: ModelSource) -> OptimizerPlan:
        raise AssertionError("never run")


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Where state goes."""

    device: Literal["cpu", "nvme"]
    """Which memory."""
    path: Path | None = None
    """The disk."""
    pin: bool = True
    """Use page-locked memory."""

    def __post_init__(self) -> None:
        if self.device == "nvme" and self.path is None:
            raise ValueError("offloading to nvme needs `path`")


@dataclass(frozen=True, kw_only=True)
class Red:
    """Wrap in red."""

    stage: Literal[1, 2, 3] = 2
    """How much."""
    offload: Literal["none"] | Offload | None = "none"
    """Where to."""
    extra: dict[str, Any] | None = None
    """Raw settings."""

    def run(self, ctx: Context, model: ModelSource, optimizer: OptimizerPlan) -> RedEngine:
        raise AssertionError("never run")


@dataclass(frozen=True, kw_only=True)
class Blue:
    """Wrap in blue."""

    bucket: Annotated[float, Field(gt=0)] = 25.0
    """Size in MB."""

    def run(self, ctx: Context, model: ModelSource, optimizer: OptimizerPlan) -> BlueEngine:
        raise AssertionError("never run")


@dataclass(frozen=True, kw_only=True)
class RedCheckpoint:
    """Save red engines."""

    every: Annotated[int, Field(ge=1)] = 10
    """Steps between."""

    def run(self, ctx: Context, engine: RedEngine) -> Checkpoints:
        raise AssertionError("never run")


@dataclass(frozen=True, kw_only=True)
class BlueCheckpoint:
    """Save blue engines."""

    every: Annotated[int, Field(ge=1)] = 10
    """Steps between."""

    def run(self, ctx: Context, engine: BlueEngine) -> Checkpoints:
        raise AssertionError("never run")


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train."""

    steps: Annotated[int, Field(ge=1)]
    """How long."""
    shuffle: bool = True
    """In another order every epoch."""

    def run(
        self, ctx: Context, engine: Engine, data: Data, checkpoints: Checkpoints | None
    ) -> TrainedRun:
        raise AssertionError("never run")


@dataclass(frozen=True, kw_only=True)
class Faulty:
    """Has a check that raises."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        raise KeyError("oops")

    def run(self, ctx: Context) -> None:
        raise AssertionError("never run")


@dataclass(kw_only=True)
class NotFrozen:
    """Can change."""

    def run(self, ctx: Context) -> None: ...


@dataclass(frozen=True)
class Positional:
    """Takes positions."""

    size: int = 1

    def run(self, ctx: Context) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Undocumented:
    size: int = 1

    def run(self, ctx: Context) -> None: ...


@dataclass(frozen=True, kw_only=True)
class NoRun:
    """Has nothing to run."""


@dataclass(frozen=True, kw_only=True)
class SaysNotWhatItReturns:
    """A stage whose result nobody could take."""

    def run(self, ctx: Context):  # type: ignore[no-untyped-def]
        return Model()


@dataclass(frozen=True, kw_only=True)
class Untyped:
    """Needs something, but not what."""

    def run(self, ctx: Context, thing) -> None: ...  # type: ignore[no-untyped-def]


@dataclass(frozen=True, kw_only=True)
class ForeseesUntyped:
    """Foresees something, but not from what."""

    def run(self, ctx: Context) -> None: ...

    def resource_needs(self, ctx: Context, thing) -> Iterator[ResourceNeed]: ...  # type: ignore[no-untyped-def]


@dataclass(frozen=True, kw_only=True)
class RehearsesUntyped:
    """Rehearses with something, but not what."""

    def run(self, ctx: Context) -> None: ...

    def run_dry(self, ctx: Context, thing) -> None: ...  # type: ignore[no-untyped-def]


class Opens:
    """Opens no models for a chat."""

    def run(self, ctx: Context) -> None: ...

    @classmethod
    def open_folder(
        cls, folder: Any, ctx: Context, model: Any, *, trust_remote_code: bool
    ) -> Any: ...

    def open_trained(self, ctx: Context, weights: Any, model: Any, trained: Any) -> Any: ...

    def open_source(self, ctx: Context, model: Any) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class OpensOnInstances(Opens):
    """Opens folders, but only where there is a stage already."""

    def open_folder(
        self, folder: Any, ctx: Context, model: Any, *, trust_remote_code: bool
    ) -> Any: ...  # type: ignore[override]


@dataclass(frozen=True, kw_only=True)
class OpensTrusting(Opens):
    """Opens folders, and asks nobody about their code."""

    @classmethod
    def open_folder(cls, folder: Any, ctx: Context, model: Any) -> Any: ...  # type: ignore[override]


@dataclass(frozen=True, kw_only=True)
class OpensSources(Opens):
    """Opens the source of more than one model."""

    def open_source(self, ctx: Context, model: Any, more: Any) -> Any: ...  # type: ignore[override]


@dataclass(frozen=True, kw_only=True)
class OpensWell(Opens):
    """Opens what it should."""

    def open_trained(
        self, ctx: Context, weights: Any, model: Any, trained: Any, *, more: int = 0
    ) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class UsesTakes:
    """Takes the other key of a recipe."""

    takes: str = ""

    def run(self, ctx: Context) -> None: ...


@dataclass(frozen=True, kw_only=True)
class UsesUse:
    """Takes the recipe's own key."""

    use: str = ""

    def run(self, ctx: Context) -> None: ...


NotAClass = 3


class RedPlanner(Planner[Red]):
    """Planner of `wrap.red`."""

    @classmethod
    def presets(cls) -> Presets:
        return {"red1": Preset(fields={"stage": 1}), "red2": Preset(fields={"stage": 2})}


class BluePlanner(Planner[Blue]):
    """Planner of `wrap.blue`."""

    @classmethod
    def presets(cls) -> Presets:
        return {"blue": Preset()}


class TrainPlanner(Planner[Train]):
    """Planner of `train.lm`."""

    def for_benchmark(self, trial: Trial) -> Train:
        return replace(self.stage, steps=trial.steps)

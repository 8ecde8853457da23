"""The stage that names a tracker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt

from pipeline.contracts.plan_view import PlanView
from pipeline.contracts.stage import Context
from pipeline.errors import Problem
from pipeline.track.contract import Tracker
from pipeline.track.start import start_feeder


@dataclass(frozen=True, kw_only=True)
class TrackerStage(ABC):
    """Base of stages that send a run's measurements to another program, from a process next to rank
    0."""

    nothing_to_plan: ClassVar[bool] = True
    package: ClassVar[str] = ""
    """Module that must be installed; empty if none has."""
    extra: ClassVar[str] = ""
    """Extra of this distribution that installs it."""

    every: Annotated[int, Ge(1)] = 1
    """Send the measurements of every so many steps; evaluations are always sent."""

    timeout: Annotated[float, Gt(0)] = 30.0
    """Seconds that are left to send everything, however the run ends; `pipe run` waits for that."""

    def unsent(self, folder: Path) -> str:
        """Return the command that sends what the tracker has taken and not sent, if it keeps that
        on disk; an empty text if there is none. `folder` is the run's."""
        return ""

    @abstractmethod
    def tracker(self) -> Tracker:
        """Return the tracker that these fields describe."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        if self.package and find_spec(self.package) is None:
            hint = f"pip install 'pipetrain[{self.extra}]'" if self.extra else ""
            yield Problem(key="use", message=f"{self.package} is not installed", hint=hint)

    def run(self, ctx: Context) -> None:
        start_feeder(ctx, self.timeout, self.unsent)

"""A tracker, and the stage that names one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt

from pipeline.contracts.stage import Context, PlanView
from pipeline.errors import Problem

Outcome = Literal["finished", "failed", "stopped"]


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The run that is tracked."""

    name: str
    """Name of its folder."""
    recipe: Mapping[str, Any]
    """The merged recipe as JSON, without the values of environment variables."""
    environment: Mapping[str, Any]
    """Packages and machine, as in `environment.json`."""
    folder: Path


class Tracker(ABC):
    """A run in another program. Its methods are called one after another, in a process of its own;
    an exception ends the tracking, and nothing else. Steps that a resumed run repeats are not sent
    again: an undisturbed resume repeats their numbers too. Steps behind a rollback are sent again,
    with their other numbers. Whatever `log` has taken counts as sent."""

    @abstractmethod
    def open(self, run: RunFacts, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Begin, or go on in the run that an earlier call began. `state` is what that call
        returned, as JSON; empty the first time."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        """Log measurements of a step; `time` is in seconds since 1970. Names of a further training
        of the run begin with its slot (`chat/loss`), and its steps begin with 1 again."""

    def log_text(self, step: int, name: str, text: str) -> None:
        """Log a text that was generated at a step. Does nothing unless overridden."""

    @abstractmethod
    def close(self, outcome: Outcome) -> None:
        """Send everything that is left; the run has ended for now."""


@dataclass(frozen=True, kw_only=True)
class TrackerStage(ABC):
    """Base of stages that send a run's measurements to another program, from a process beside rank
    0."""

    package: ClassVar[str] = ""
    """Module that has to be installed; empty if none has."""
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
        from pipeline.track.start import start_feeder

        start_feeder(ctx, self.timeout, self.unsent)

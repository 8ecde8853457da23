"""Weights & Biases as a tracker."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.track import Outcome, RunFacts, Tracker, TrackerStage


@dataclass(frozen=True, kw_only=True)
class TrackWandb(TrackerStage):
    """Send measurements to Weights & Biases.

    The key comes from `WANDB_API_KEY` or `wandb login`, never from the recipe. With `mode: offline`
    nothing is sent: `wandb sync` does that later, from a machine with a network.
    """

    package = "wandb"
    extra = "wandb"

    project: str | None = None
    """Null takes the recipe's name."""
    entity: str | None = None
    """User or team; null takes the default of the account."""
    name: str | None = None
    """Name of the run; null takes its folder's name."""
    group: str | None = None
    """Name that runs have in common, which are then shown together."""
    tags: tuple[str, ...] = ()
    """Words by which runs are found."""
    notes: str | None = None
    """Text about the run."""
    mode: Literal["online", "offline"] | None = None
    """Null does as `WANDB_MODE` says; online without it."""

    def tracker(self) -> Tracker:
        return WandbTracker(self)

    def unsent(self, folder: Path) -> str:
        return f"wandb sync {shlex.quote(str(folder))}/wandb/*run-*"


@dataclass
class WandbTracker(Tracker):
    """A run of W&B, found again by its id."""

    settings: TrackWandb

    def open(self, run: RunFacts, state: Mapping[str, Any]) -> Mapping[str, Any]:
        import wandb

        own = self.settings
        self._run = wandb.init(
            project=own.project or str(run.recipe["name"]),
            entity=own.entity,
            name=own.name or run.name,
            group=own.group,
            tags=list(own.tags),
            notes=own.notes,
            mode=own.mode,
            id=state.get("id"),
            resume="allow",
            dir=str(run.folder),
            config={"recipe": dict(run.recipe), "environment": dict(run.environment)},
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        return {"id": self._run.id}

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        self._run.log({**metrics, "step": step, "_timestamp": time})

    def log_text(self, step: int, name: str, text: str) -> None:
        import html

        import wandb

        shown = f"<pre style='white-space: pre-wrap'>{html.escape(text)}</pre>"
        self._run.log({name: wandb.Html(shown), "step": step})

    def close(self, outcome: Outcome) -> None:
        self._run.finish(exit_code=int(outcome == "failed"))

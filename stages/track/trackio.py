"""trackio as a tracker."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.track import Outcome, RunFacts, Tracker, TrackerStage


@dataclass(frozen=True, kw_only=True)
class TrackTrackio(TrackerStage):
    """Keep measurements where trackio shows them: `trackio show`.

    They lie on this machine, in `TRACKIO_DIR`, unless a space of the Hugging Face hub is named.
    """

    package = "trackio"
    extra = "trackio"

    project: str | None = None
    """Null takes the recipe's name."""
    name: str | None = None
    """Name of the run, null takes its folder's name; a few letters are added, since trackio takes
    runs of the same name for one."""
    space: str | None = None
    """Space of the Hugging Face hub, OWNER/NAME, that gets the measurements instead."""
    folder: str | None = None
    """Folder instead of the one that `TRACKIO_DIR` names."""

    def tracker(self) -> Tracker:
        return TrackioTracker(self)

    def unsent(self, folder: Path) -> str:
        return "trackio sync --all" if self.space else ""


@dataclass
class TrackioTracker(Tracker):
    """A run of trackio, found again by its name."""

    settings: TrackTrackio

    def open(self, run: RunFacts, state: Mapping[str, Any]) -> Mapping[str, Any]:
        own = self.settings
        if own.folder is not None:
            os.environ["TRACKIO_DIR"] = own.folder
        import trackio

        name = state.get("name") or f"{own.name or run.name}-{secrets.token_hex(3)}"
        self._run = trackio.init(
            project=own.project or str(run.recipe["name"]),
            name=name,
            space_id=own.space,
            config={"recipe": dict(run.recipe)},
            resume="allow",
            embed=False,
        )
        return {"name": name}

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        self._run.log(dict(metrics), step=step)

    def log_text(self, step: int, name: str, text: str) -> None:
        import trackio

        self._run.log({name: trackio.Markdown(text)}, step=step)

    def close(self, outcome: Outcome) -> None:
        self._run.finish()

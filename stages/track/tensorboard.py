"""TensorBoard as a tracker."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.track import Outcome, RunFacts, Tracker, TrackerStage


@dataclass(frozen=True, kw_only=True)
class TrackTensorboard(TrackerStage):
    """Write event files that TensorBoard shows: `tensorboard --logdir FOLDER`."""

    package = "tensorboard"
    extra = "tensorboard"

    folder: str | None = None
    """Folder in which the run gets a folder of its own; null writes to `tensorboard` in the run's
    folder."""

    def tracker(self) -> Tracker:
        return TensorboardTracker(self.folder)


@dataclass
class TensorboardTracker(Tracker):
    """Scalars by step, generated texts, and the recipe as a text."""

    parent: str | None

    def open(self, run: RunFacts, state: Mapping[str, Any]) -> Mapping[str, Any]:
        from torch.utils.tensorboard import SummaryWriter

        own = Path(self.parent) / run.name if self.parent else run.folder / "tensorboard"
        folder = state.get("folder", str(own))
        self._writer = SummaryWriter(folder)
        if not state:
            recipe = json.dumps(run.recipe, indent=1)
            self._writer.add_text("recipe", f"```json\n{recipe}\n```", 0)
        return {"folder": folder}

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step, walltime=time)

    def log_text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, text, step)

    def close(self, outcome: Outcome) -> None:
        self._writer.close()

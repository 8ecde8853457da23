"""TensorBoard as a tracker."""

from __future__ import annotations

import contextlib
import itertools
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
    """Folder in which the run gets its own folder; null writes to `tensorboard` in the run's
    folder."""

    def tracker(self) -> Tracker:
        return TensorboardTracker(self.folder)


@dataclass
class TensorboardTracker(Tracker):
    """Scalars by step, generated texts, and the recipe as a text, all written at once."""

    parent: str | None

    def open(self, run: RunFacts, state: Mapping[str, Any]) -> Mapping[str, Any]:
        from torch.utils.tensorboard import SummaryWriter

        # In the run's folder the place is not kept: that folder may be moved.
        # It is a path, also in a folder that came from elsewhere: TensorBoard opens any address.
        given = state.get("folder") and str(Path(state["folder"]))
        if self.parent and not given:
            for number in itertools.count(1):  # another run may have a folder of this name
                folder = Path(self.parent) / (f"{run.name}-{number}" if number > 1 else run.name)
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(parents=True)
                    given = str(folder)
                    break
        self._writer = SummaryWriter(given or str(run.folder / "tensorboard"))
        if not state:
            recipe = json.dumps(run.recipe, indent=1)
            self._writer.add_text("recipe", f"```json\n{recipe}\n```", 0)
        return {"folder": given}

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step, walltime=time)
        self._writer.flush()

    def log_text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, text, step)
        self._writer.flush()

    def close(self, outcome: Outcome) -> None:
        self._writer.close()

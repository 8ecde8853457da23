"""The door for authors of trackers: a stage that sends a run's measurements to another program.

A run's folder is read by a process of the tracker's own, so nothing that it does, however slowly it
does it and however it ends, touches the training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.utils.packages import lazily

if TYPE_CHECKING:
    from pipeline.track.stage import Outcome as Outcome
    from pipeline.track.stage import RunFacts as RunFacts
    from pipeline.track.stage import Tracker as Tracker
    from pipeline.track.stage import TrackerStage as TrackerStage
else:
    __getattr__, __dir__ = lazily(__name__, __file__)

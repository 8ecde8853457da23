"""Rank 0's long work, in `activity.json` of the run's folder and, now and then, in its log."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.execution.rank_logging import IN_DISPLAY
from pipeline.utils.activities import Activity
from pipeline.utils.files import replace_text

FILE = "activity.json"
WRITE_SECONDS = 1.0
"""Seconds between two writes of the file."""
LOG_SECONDS = 10.0
"""Seconds between two lines in the log, and before the first."""


def clear(run_dir: Path) -> None:
    """Forget what rank 0 was doing in an earlier start, in which it may have been killed."""
    (run_dir / FILE).unlink(missing_ok=True)


@dataclass(eq=False)
class ActivityRecord:
    """Shows a rank's newest activity: in its log, and in the run's folder if it is given one."""

    log: logging.Logger
    folder: Path | None
    _under_way: list[Activity] = field(default_factory=list, init=False)
    _written: float = field(default=0.0, init=False)
    _logged: dict[Activity, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._write()  # a launcher may start ranks again after one was killed at work

    def changed(self, activity: Activity) -> None:
        now = time.monotonic()
        if activity not in self._under_way:
            self._under_way.append(activity)
        if activity is not self._under_way[-1]:
            return
        if now - self._logged.setdefault(activity, activity.began) >= LOG_SECONDS:
            self._logged[activity] = now
            self.log.info("%s", activity.describe(), extra=IN_DISPLAY)
        if now - self._written >= WRITE_SECONDS:
            self._written = now
            self._write()

    def ended(self, activity: Activity) -> None:
        if activity in self._under_way:
            self._under_way.remove(activity)
        self._logged.pop(activity, None)
        self._written = 0.0
        self._write()

    def _write(self) -> None:
        """Write the newest activity; remove the file if there is none. It is only for people, so a
        disk that is full or gone ends nothing."""
        if self.folder is None:
            return
        file = self.folder / FILE
        with contextlib.suppress(OSError):
            if self._under_way:
                newest = self._under_way[-1]
                facts = {name: getattr(newest, name) for name in ("name", "done", "total", "unit")}
                replace_text(file, json.dumps({**facts, "seconds": round(newest.seconds, 3)}))
            else:
                file.unlink(missing_ok=True)

"""Progress of long work on the terminal of the command that does it."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from pipeline.utils.activities import Activity
from pipeline.utils.terminal import bare, shown
from pipeline.utils.text import duration

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_SECONDS = 10.0
"""Seconds between two lines about an activity where no bar can be drawn, and before the first."""
BAR_SECONDS = 0.5
"""Seconds after which an activity is worth a bar."""


class CommandActivities:
    """Shows activities on standard error: a bar each in a terminal, elsewhere a line now and then
    about the newest."""

    def __init__(self) -> None:
        self._bars: dict[Activity, TaskID] = {}
        self._progress: Progress | None = None
        self._said: dict[Activity, float] = {}

    def changed(self, activity: Activity) -> None:
        if sys.stderr.isatty():
            if activity.seconds >= BAR_SECONDS:
                self._draw(activity)
            return
        last = self._said.setdefault(activity, activity.began)
        newest = activity is next(reversed(self._said))
        if newest and time.monotonic() - last >= LINE_SECONDS:
            self._said[activity] = time.monotonic()
            click.echo(activity.describe(), err=True)

    def ended(self, activity: Activity) -> None:
        self._said.pop(activity, None)
        bar = self._bars.pop(activity, None)
        if bar is not None and self._progress is not None:
            self._progress.remove_task(bar)
            if not self._bars:
                self._progress.stop()
                self._progress = None

    def close(self) -> None:
        """Leave the terminal as it was, whatever is still shown."""
        if self._progress is not None:
            self._progress.stop()

    def _draw(self, activity: Activity) -> None:
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                TextColumn("{task.fields[amount]}"),
                TimeRemainingColumn(),
                console=Console(file=bare(sys.stderr), highlight=False),
                transient=True,
            )
            self._progress.start()
        if activity not in self._bars:
            name, total = shown(activity.name), activity.total
            self._bars[activity] = self._progress.add_task(name, total=total, amount="")
        amount = activity.amount if activity.done else ""
        if not amount and activity.total is None:
            amount = duration(activity.seconds)
        self._progress.update(self._bars[activity], completed=activity.done, amount=amount)

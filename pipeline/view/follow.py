"""Follow a run by its folder while it goes on."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.execution import rundir
from pipeline.execution.activity_record import FILE as ACTIVITY
from pipeline.execution.journal import counted, is_event
from pipeline.execution.metrics import is_record, training_of
from pipeline.utils.jsonl import Tail
from pipeline.view.history import DOING, PLAN_FILE, PLANNED, Chain, RunState, json_in, state_of
from pipeline.view.trainings import MeanSpeed, measured

KEPT = 1000
"""Newest steps whose losses are kept for the curve."""
NEWEST_BYTES = 1 << 20
"""Bytes of `metrics.jsonl` that are read of a run that began earlier."""
PACES = 20
"""Newest steps over whose time a mean is taken."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Lines that were added to the files of a run's folder since the last look."""

    events: list[dict[str, Any]]
    """Lines of the journal."""
    metrics: list[dict[str, Any]]
    again: bool
    """Whether `metrics` begin with those of earlier starts, or with some that were new before."""


@dataclass(eq=False)
class Follower:
    """A run as it is now; `look` brings it up to date."""

    folder: Path
    slots: Mapping[str, str]
    """Slot -> name of its stage, in order."""
    chain: Chain = field(init=False)
    step: dict[str, Any] = field(default_factory=dict, init=False)
    """The newest step's record; empty before the first."""
    losses: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=KEPT), init=False)
    """Step and loss of the newest steps, oldest first."""
    paces: deque[float] = field(default_factory=lambda: deque(maxlen=PACES), init=False)
    """Seconds of the newest steps."""
    speed: MeanSpeed = field(default_factory=MeanSpeed, init=False)
    """Of the steps that were read: of a run that began earlier, the newest."""
    evaluation: dict[str, Any] = field(default_factory=dict, init=False)
    """The newest evaluation's record; empty before the first."""
    first_evaluation: dict[str, Any] = field(default_factory=dict, init=False)
    """The first evaluation's record; empty before it, and where it was not read."""
    measured: dict[str, deque[tuple[int, float]]] = field(default_factory=dict, init=False)
    """Name -> step and value of the newest of a plugin's numbers, oldest first."""
    communication: dict[str, Any] = field(default_factory=dict, init=False)
    """The newest profiled step's record; empty without one."""
    saved: dict[str, Any] = field(default_factory=dict, init=False)
    """The newest checkpoint's record; empty before the first."""
    training: str = field(default="", init=False)
    """Slot of the training that is followed, the newest; empty for the recipe's first."""
    ended_early: str = field(default="", init=False)
    """Why training ended before its last step; empty if it did not."""

    def __post_init__(self) -> None:
        self.chain = Chain(self.slots)
        self._events: list[dict[str, Any]] = []
        self._last_sign = 0.0
        self._journal = Tail(self.folder / rundir.JOURNAL)
        self._metrics = Tail(self.folder / rundir.METRICS, newest_bytes=NEWEST_BYTES)

    def look(self) -> Found:
        """Read what is new, and take note of it."""
        events = [event for event in self._journal.read() if is_event(event)]
        self._events += events
        if any(event.get("undone") for event in events):
            self._events, self.chain = counted(self._events), Chain(self.slots)
            self.chain.update(self._events)
        else:
            self.chain.update(events)
        first = not self._metrics.began
        metrics = [record for record in self._metrics.read() if is_record(record)]
        if self._metrics.replaced:
            self._forget()
        for record in metrics:
            self._note(record)
            self._last_sign = max(self._last_sign, float(record.get("time") or 0.0))
        if not self.chain.ended and self.state != "running":
            self.chain.end_silently(self._last_sign)
        return Found(events=events, metrics=metrics, again=first or self._metrics.replaced)

    def activity(self) -> dict[str, Any]:
        """Return what rank 0 is doing: `name`, `done`, `total`, `unit`, `seconds`; empty if it has
        not said so, or if the run is not under way: a killed rank leaves its file behind."""
        if self.state != "running":
            return {}
        found = json_in(self.folder / ACTIVITY, DOING)
        return found if found.keys() >= DOING.keys() else {}

    @property
    def planned_bytes(self) -> int | None:
        """Bytes of a GPU that the run's plan expects; None without a plan."""
        return json_in(self.folder / PLAN_FILE, PLANNED).get("needed_bytes")

    @property
    def state(self) -> RunState:
        """Whether the run is under way, and how it ended if not."""
        if rundir.is_locked(self.folder):
            return "running"
        return state_of(self.folder, self._events)

    @property
    def seconds(self) -> float:
        """Seconds of the newest start of the run, so far or to its end."""
        if not self.chain.started:
            return 0.0
        return max(0.0, (self.chain.ended or time.time()) - self.chain.started)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last step at the mean speed of the newest steps; None if not known, or
        if the training has ended."""
        if self.ended_early or self.state == "finished":
            return None
        total, step = self.step.get("total_steps"), self.step.get("step")
        if total is None or step is None or not self.paces:
            return None
        return float((total - step) * statistics.fmean(self.paces))

    def _forget(self) -> None:
        """Begin again: a resumed run has dropped steps that are to be repeated, or another training
        has begun."""
        self.losses.clear()
        self.paces.clear()
        self.measured.clear()
        self.speed = MeanSpeed()
        self.step, self.evaluation, self.first_evaluation = {}, {}, {}
        self.communication, self.saved, self.ended_early = {}, {}, ""

    def _note(self, record: dict[str, Any]) -> None:
        if training_of(record) != self.training:
            self._forget()
            self.training = training_of(record)
        if "ended_early" in record:
            self.ended_early = record["ended_early"]
        if "loss" in record:
            self.step, self.ended_early = record, ""
            if record["loss"] is not None:
                self.losses.append((record["step"], record["loss"]))
            if record.get("step_seconds") is not None:
                self.paces.append(record["step_seconds"])
            self.speed.add(record)
        elif record.get("total_steps") and self.step:  # of a start that had no step to take
            total = max(record["total_steps"], self.step["step"])
            self.step = {**self.step, "total_steps": total}
        if "eval_loss" in record:
            self.evaluation = record
            if self._metrics.whole and not self.first_evaluation:
                self.first_evaluation = record
        for name, value in measured(record):
            values = self.measured.setdefault(name, deque(maxlen=KEPT))
            values.append((record["step"], value))
        if record.get("communication_share") is not None:
            self.communication = record
        if "checkpoint_stall_seconds" in record and record.get("time") is not None:
            self.saved = record

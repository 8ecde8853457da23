"""The state of a run, by its events and records: one fold, for resumes, displays, reports, lists.

Events are lines of the journal (`event`, `time`), records are lines of `metrics.jsonl` (`step`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableSequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.contracts.metrics import OWN, kind_of, numbers, record_training
from pipeline.utils.hub import recorded

State = Literal["waiting", "running", "finished", "failed", "stopped"]
ENDS: Mapping[str, State] = {
    "run failed": "failed",
    "run stopped": "stopped",
    "run finished": "finished",
}
"""Events that end a start of a run -> state of the slot that was running."""
SILENT = "no end was recorded: the run was killed, or its machine went down"
WEIGHTED = ("tokens_per_second", "mfu", "data_wait_share")
"""Fields of a step's record whose means are taken over time."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A slot that ran to its end: its `digest`, and the `record` of a durable result."""

    digest: str
    record: Mapping[str, Any] | None


@dataclass(kw_only=True)
class SlotState:
    """One slot of a run."""

    state: State = "waiting"
    began: float = 0.0
    """Time of its newest start, in seconds since 1970; 0 before the first."""
    seconds: float = 0.0
    """Seconds of all its passes, as far as they came."""


@dataclass
class MeanSpeed:
    """Means over all steps so far, weighted by the time of each: `tokens_per_second` is the number
    of tokens divided by the time of training."""

    steps: int = 0
    """Steps whose time is known."""
    seconds: float = 0.0
    """Their time in seconds, without evaluations and saves."""
    _sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Field -> sum of value times seconds, and sum of seconds."""

    def add(self, record: Mapping[str, Any]) -> None:
        """Include a step's record; one without a time changes nothing."""
        seconds = record.get("step_seconds")
        if seconds is not None:
            self.steps, self.seconds = self.steps + 1, self.seconds + seconds
            for name in (name for name in WEIGHTED if record.get(name) is not None):
                total, time = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = total + record[name] * seconds, time + seconds

    def mean(self, name: str) -> float | None:
        """The mean of one of WEIGHTED over the steps that have it; None if none has."""
        total, time = self._sums.get(name, (0.0, 0.0))
        return total / time if time > 0 else None


def measured(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Names and values of a record's numbers that the training itself does not write."""
    if kind_of(record) in ("step", "evaluation", "other"):
        yield from ((name, value) for name, value in numbers(record) if name not in OWN)


@dataclass(kw_only=True)
class Training:
    """The measurements of one training so far."""

    slot: str = ""
    """The slot that trains; empty for the recipe's first training."""
    label: str = ""
    """Its name in a run of several trainings."""
    records: MutableSequence[dict[str, Any]] = field(default_factory=list)
    """Its records in order; of a run that is followed, the newest."""
    newest: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`step`, `evaluation`, `checkpoint` or `communication` -> the newest record of one."""
    first_evaluation: dict[str, Any] = field(default_factory=dict)
    """Empty before it."""
    speed: MeanSpeed = field(default_factory=MeanSpeed)
    best: dict[str, Any] | None = None
    """Lowest held-out loss, `eval_loss`, and its `step`; None before an evaluation."""
    ended_early: str = ""
    """Why it ended before its last step; empty if it did not, or continued since."""
    _total: int = 0

    def add(self, record: dict[str, Any]) -> None:
        """Include a record."""
        self.records.append(record)
        self._total = record.get("total_steps") or self._total
        self.ended_early = record.get("ended_early", self.ended_early)
        if "loss" in record:
            self.newest["step"], self.ended_early = record, ""
            self.speed.add(record)
        if "eval_loss" in record:
            self.newest["evaluation"] = record
            self.first_evaluation = self.first_evaluation or record
        if "checkpoint_stall_seconds" in record and record.get("time") is not None:
            self.newest["checkpoint"] = record
        if record.get("communication_share") is not None:
            self.newest["communication"] = record
        if record.get("best_step") is not None:
            self.best = {"step": record["best_step"], "eval_loss": record["best_eval_loss"]}

    def named(self, text: str) -> str:
        """A label for people, which tells the run's trainings apart."""
        return f"{self.label} {text}".strip()

    @property
    def step(self) -> dict[str, Any]:
        """The newest step's record, with the total of the run's newest start, and no fewer than are
        done; empty before the first."""
        newest = self.newest.get("step", {})
        if newest and self._total:
            return {**newest, "total_steps": max(self._total, newest["step"])}
        return newest

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Records of steps."""
        steps = [record for record in self.records if "loss" in record]
        return [*steps[:-1], self.step] if steps else []

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Records of evaluations."""
        return [record for record in self.records if "eval_loss" in record]

    @property
    def measured(self) -> dict[str, list[tuple[int, float]]]:
        """Name -> step and value of each number that a plugin has written."""
        found: dict[str, list[tuple[int, float]]] = {}
        for record in self.records:
            for name, value in measured(record):
                found.setdefault(name, []).append((record["step"], value))
        return found


@dataclass(eq=False)
class RunState:
    """A run as its events and records say."""

    kept: int | None = None
    """Newest records of a training that are kept; None keeps all."""
    slots: dict[str, SlotState] = field(default_factory=dict, init=False)
    finished: dict[str, Finished] = field(default_factory=dict, init=False)
    """The newest finish of each slot that was not set aside since."""
    events: list[dict[str, Any]] = field(default_factory=list, init=False)
    """Events that count: without undone commands, which failed before they did anything and left
    the run as it was. A start that was killed gets an end: SILENT."""
    trainings: dict[str, Training] = field(default_factory=dict, init=False)
    """By slot (empty: the recipe's first), in the order in which they began."""
    started: float = field(default=0.0, init=False)
    """Time of the newest start of the run, in seconds since 1970; 0 before the first."""
    ended: float = field(default=0.0, init=False)
    """Time at which that ended; 0 if it has not."""
    slot: str | None = field(default=None, init=False)
    """The slot that started last in the newest start of the run."""
    commits: dict[tuple[str, str, str], str] = field(default_factory=dict, init=False)
    """`HubName.asked` -> the commit that it stood for when the run was started."""
    _last_sign: float = field(default=0.0, init=False)
    _command: int = field(default=0, init=False)
    """Number of events before the newest command."""

    @classmethod
    def of(cls, events: Iterable[dict[str, Any]]) -> RunState:
        """The state after these events."""
        state = cls()
        for event in events:
            state.apply(event)
        return state

    def apply(self, one: dict[str, Any]) -> None:
        """Take an event or a record into account."""
        if "event" in one:
            self._apply_event(one)
        else:
            slot = record_training(one)
            if slot not in self.trainings:
                records: Any = [] if self.kept is None else deque(maxlen=self.kept)
                self.trainings[slot] = Training(slot=slot, records=records)
            self.trainings[slot].add(one)
        self._last_sign = max(self._last_sign, float(one.get("time") or 0.0))

    def end_silently(self) -> None:
        """Note that the newest start was killed, if it has not ended."""
        if self.started and not self.ended:
            self._end({"event": "run stopped", "time": self._last_sign, "problem": SILENT})

    @property
    def ended_well(self) -> bool:
        """Whether the newest event is the end of a run in which every stage finished."""
        return bool(self.events) and self.events[-1]["event"] == "run finished"

    def _apply_event(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind in ("slot set aside", "run started"):
            self.end_silently()
            follows = bool(self.events) and self.events[-1]["event"] == "slot set aside"
            if not follows and not event.get("restart"):
                self._command = len(self.events)
        if kind in ENDS:
            self._end(event)
            if event.get("undone"):
                del self.events[self._command :]
                before = RunState.of(self.events)
                self.slots, self.finished = before.slots, before.finished
                self.commits = before.commits
                self.started, self.ended = before.started, before.ended
            return
        if kind == "run started":
            self.started, self.ended, self.slot = event["time"], 0.0, None
            self.commits |= recorded(event.get("hub"))
            for one in self.slots.values():
                one.state = "waiting" if one.state in ("failed", "stopped") else one.state
        elif kind.startswith("slot "):
            slot = self.slots.setdefault(event["slot"], SlotState())
            if kind == "slot set aside":
                slot.state = "waiting"
                self.finished.pop(event["slot"], None)
            elif kind == "slot started":
                slot.state, slot.began = "running", event["time"]
                self.slot = event["slot"]
            else:
                slot.state = "finished"
                done = Finished(digest=event["digest"], record=event["record"])
                self.finished[event["slot"]] = done
                slot.seconds += event.get("seconds", event["time"] - slot.began)
        self.events.append(event)

    def _end(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        self.ended = event["time"]
        for slot in self.slots.values():
            if slot.state == "running":
                slot.state = ENDS[event["event"]]
                slot.seconds += max(0.0, event["time"] - slot.began)

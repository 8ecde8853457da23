"""Feeding a tracker what is new in a run's folder."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.chain.plan import Plan
from pipeline.contracts.metrics import UNSENT, is_record, kind_of, numbers, training_of
from pipeline.contracts.stage import ENVIRONMENT_FILE
from pipeline.errors import in_words
from pipeline.execution import rundir
from pipeline.recipe import Recipe
from pipeline.recipe.nodes import mapped
from pipeline.track.contract import Outcome, RunFacts, Tracker
from pipeline.track.stage import TrackerStage
from pipeline.utils.files import opened, private_folder, replace_text, wait_for_lock
from pipeline.utils.foreign import json_object
from pipeline.utils.jsonl import Tail
from pipeline.utils.terminal import shown

FOLDER = "trackers"
KEEP_SECONDS = 1.0
"""Seconds of sending between two writes of what has been sent."""


@dataclass
class Sent:
    """How far a run has been sent to a tracker."""

    newest: dict[str, int] = field(default_factory=dict)
    """Kind of record -> step of the newest one; evaluations come after the steps, and anomalies
    have the number of the step that failed."""
    rollbacks: list[dict[str, Any]] = field(default_factory=list)
    """Records of rollbacks, after which steps come again with other numbers."""
    further: dict[str, dict[str, int]] = field(default_factory=dict)
    """Slot of a further training -> what `newest` is of the first."""

    def _of(self, training: str) -> dict[str, int]:
        return self.further.setdefault(training, {}) if training else self.newest

    def covers(self, step: int, kind: str, training: str) -> bool:
        """Whether a record of this step has been sent."""
        return step <= self._of(training).get(kind, -1)

    def add(self, step: int, kind: str, training: str) -> None:
        """Note that a record has been sent."""
        self._of(training)[kind] = step

    def go_back(self, rollback: Mapping[str, Any]) -> None:
        """Note that nothing from a rollback's step on has been sent. One that a resumed run repeats
        counts too: the numbers before it have been repeated, and maybe sent."""
        if rollback not in self.rollbacks:
            self.rollbacks.append(dict(rollback))
            before = (rollback.get("step") or 0) - 1
            newest = self._of(training_of(rollback))
            newest |= {kind: min(step, before) for kind, step in newest.items()}


@dataclass(eq=False)
class Feeder:
    """Sends what is new in a run's folder to a tracker, and remembers what was sent."""

    folder: Path
    slot: str
    every: int
    tracker: Tracker
    sent: Sent = field(default_factory=Sent, init=False)
    steps: int = field(default=0, init=False)
    """Number of steps that were sent, at least in part."""
    _state: Mapping[str, Any] = field(default_factory=dict, init=False)
    _kept: float = field(default=0.0, init=False)
    _counted: tuple[str, int] = field(default=("", -1), init=False)
    """The training and the step that were counted last."""

    def __post_init__(self) -> None:
        self._tail = Tail(self.folder / rundir.METRICS)
        self._file = private_folder(self.folder / FOLDER) / f"{self.slot}.json"

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other process feeds this run's tracker, and keep others waiting."""
        with opened(self._file.with_suffix(".lock"), "a") as file:
            wait_for_lock(file)
            yield

    def open(self, run: RunFacts) -> None:
        """Begin, or continue where an earlier process has ended."""
        kept = json_object(self._file)
        self.sent = Sent(**kept.get("sent", {}))
        self._state = self.tracker.open(run, kept.get("state", {}))
        self._keep()

    def feed(self) -> None:
        """Send what is new, and keep in mind that it was sent."""
        new = [record for record in self._tail.read() if is_record(record)]
        try:
            for record in new:
                step, kind = record.get("step") or 0, _kind(record)
                if kind == "anomaly" and record.get("action") == "rollback":
                    self.sent.go_back(record)
                if not self.sent.covers(step, kind, training_of(record)):
                    self._send(step, record)
                    self.sent.add(step, kind, training_of(record))
                if time.monotonic() - self._kept > KEEP_SECONDS:
                    self._keep()
        finally:
            if new:
                self._keep()

    def close(self, outcome: Outcome) -> None:
        """Send the rest, and end."""
        self.feed()
        self.tracker.close(outcome)
        self._keep()

    def _send(self, step: int, record: Mapping[str, Any]) -> None:
        if kind_of(record) == "step" and step % self.every:
            return
        prefix = f"{training_of(record)}/" if training_of(record) else ""
        metrics = {f"{prefix}{name}": value for name, value in _measurements(record)}
        if metrics:
            self.tracker.log(step, metrics, float(record.get("time") or time.time()))
        texts = record.get("generated", ())
        for sample in texts:
            text = shown(f"{sample['prompt']}{sample['text']}")
            self.tracker.log_text(step, f"{prefix}generated/{sample['number']}", text)
        if metrics or texts:
            self.steps += (prefix, step) != self._counted
            self._counted = prefix, step

    def _keep(self) -> None:
        self._kept = time.monotonic()
        record = {"sent": asdict(self.sent), "state": dict(self._state)}
        replace_text(self._file, json.dumps(record))


def _kind(record: Mapping[str, Any]) -> str:
    """Return a record's kind; records of plugins are distinguished by what they measure, as several
    may write records of the same step."""
    kind = kind_of(record)
    return kind if kind != "other" else " ".join(sorted(name for name, _ in _measurements(record)))


def _measurements(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield names and values of a record's numbers; numbers of evaluations as `eval/loss`."""
    for name, value in numbers(record):
        if name not in UNSENT:
            yield ("eval/loss" if name == "eval_loss" else name), value


def facts_of(folder: Path, recipe: Recipe) -> RunFacts:
    """Return the facts of the run of a recipe in `folder`, as others may see them."""
    return RunFacts(
        name=folder.resolve().name,
        recipe=mapped(recipe.public(), lambda one: shown(one) if isinstance(one, str) else one),
        environment=json_object(folder / ENVIRONMENT_FILE, within=folder),
        folder=folder,
    )


def failure(folder: Path, slot: str, error: Exception) -> str:
    """Say in a line that an error has ended the tracking; its traceback goes into a file. The
    caller says what sends the rest."""
    where = folder / FOLDER / f"{slot}.txt"
    why = shown(in_words(error).splitlines()[0])
    try:
        text = shown("".join(traceback.format_exception(error)))
        replace_text(private_folder(where.parent) / where.name, text)
    except OSError:
        return f"tracking has ended: {why}"
    return f"tracking has ended: {why} (more in {where})"


def feeders(folder: Path, plan: Plan) -> dict[str, Feeder]:
    """Return slot -> feeder of its tracker, of a run in `folder` under a plan."""
    return {
        planned.slot: Feeder(folder, planned.slot, planned.stage.every, planned.stage.tracker())
        for planned in plan.slots
        if isinstance(planned.stage, TrackerStage)
    }

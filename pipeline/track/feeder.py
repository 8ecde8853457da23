"""A process that reads a run's folder and feeds one tracker: `python -m pipeline.track.feeder
RUN_DIR SLOT`. A line on standard input says how the run has ended; so does its end, when rank 0 has
died. What it prints is shown as warnings."""

from __future__ import annotations

import contextlib
import json
import select
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.chain.plan import Plan, make_plan
from pipeline.contracts.stage import ENVIRONMENT_FILE
from pipeline.errors import in_words
from pipeline.execution import rundir
from pipeline.execution.metrics import is_record, kind_of
from pipeline.recipe import Recipe, load_recipe
from pipeline.track.contract import Outcome, RunFacts, Tracker, TrackerStage
from pipeline.utils.files import private_folder, replace_text
from pipeline.utils.terminal import guard, shown
from pipeline.view.tail import Tail

FOLDER = "trackers"
LOOK_SECONDS = 1.0
"""Seconds between two looks at the run's folder."""
KEEP_SECONDS = 10.0
"""Seconds between two writes of what has been sent."""
UNSENT = ("step", "time", "total_steps", "profiled", "applied", "straggler")
"""Fields of records that are no measurements."""


@dataclass
class Sent:
    """How far a tracker has been told of a run."""

    step: int = -1
    """The last step of which something was sent; -1 before any."""
    kinds: list[str] = field(default_factory=list)
    """Kinds of the records of that step that were sent: evaluations and saves have their own."""
    rollbacks: list[dict[str, Any]] = field(default_factory=list)
    """Records of rollbacks, behind which steps come again with other numbers."""

    def covers(self, step: int, kind: str) -> bool:
        """Whether a record of this step has been sent."""
        return step < self.step or (step == self.step and kind in self.kinds)

    def add(self, step: int, kind: str) -> None:
        """Note that a record has been sent."""
        if step > self.step:
            self.step, self.kinds = step, []
        self.kinds.append(kind)

    def go_back(self, rollback: dict[str, Any]) -> None:
        """Note that the steps from a rollback's on have not been sent. A resumed run repeats the
        record with the numbers."""
        if rollback not in self.rollbacks:
            self.rollbacks.append(rollback)
            self.step, self.kinds = min(self.step, (rollback.get("step") or 0) - 1), []


@dataclass(eq=False)
class Feeder:
    """Sends what is new in a run's folder to a tracker, and remembers what was sent."""

    folder: Path
    slot: str
    every: int
    tracker: Tracker
    sent: Sent = field(default_factory=Sent, init=False)
    _state: Mapping[str, Any] = field(default_factory=dict, init=False)
    _kept: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._tail = Tail(self.folder / rundir.METRICS)
        self._file = private_folder(self.folder / FOLDER) / f"{self.slot}.json"

    def open(self, run: RunFacts) -> int:
        """Begin, or go on where an earlier process has ended: behind the step that is returned."""
        kept: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            kept = json.loads(self._file.read_text("utf-8"))
        self.sent = Sent(**kept.get("sent", {}))
        self._state = self.tracker.open(run, kept.get("state", {}))
        self._keep()
        return self.sent.step

    def feed(self) -> None:
        """Send what is new."""
        for record in self._tail.read():
            if not is_record(record):
                continue
            step, kind = record.get("step") or 0, kind_of(record)
            if kind == "anomaly" and record.get("action") == "rollback":
                self.sent.go_back(record)
            if not self.sent.covers(step, kind):
                self._send(step, record)
                self.sent.add(step, kind)
        if time.monotonic() - self._kept > KEEP_SECONDS:
            self._keep()

    def close(self, outcome: Outcome) -> None:
        """Send the rest, and end."""
        self.feed()
        self.tracker.close(outcome)
        self._keep()

    def _send(self, step: int, record: Mapping[str, Any]) -> None:
        if kind_of(record) == "step" and step % self.every:
            return
        metrics = dict(_measurements(record))
        if metrics:
            self.tracker.log(step, metrics, float(record.get("time") or time.time()))
        for sample in record.get("generated", ()):
            text = f"{sample['prompt']}{sample['text']}"
            self.tracker.log_text(step, f"generated/{sample['number']}", text)

    def _keep(self) -> None:
        self._kept = time.monotonic()
        record = {"sent": asdict(self.sent), "state": dict(self._state)}
        replace_text(self._file, json.dumps(record))


def _measurements(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield names and values of a record's numbers; those of evaluations as `eval/loss`."""
    for name, value in record.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and name not in UNSENT and not name.startswith("best_"):
            yield ("eval/loss" if name == "eval_loss" else name), float(value)


def facts_of(folder: Path, recipe: Recipe) -> RunFacts:
    """Return the facts of the run in `folder`, which runs under `recipe`, as others may see them."""
    environment: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        environment = json.loads((folder / ENVIRONMENT_FILE).read_text("utf-8"))
    return RunFacts(
        name=folder.resolve().name,
        recipe={key: _shown(value) for key, value in recipe.public().items()},
        environment=environment,
        folder=folder,
    )


def _shown(value: Any) -> Any:
    """Return JSON without passwords in addresses and values of variables."""
    if isinstance(value, Mapping):
        return {key: _shown(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_shown(inner) for inner in value]
    return shown(value) if isinstance(value, str) else value


def feeders(folder: Path, plan: Plan) -> dict[str, Feeder]:
    """Return slot -> feeder of its tracker, of a run in `folder` under a plan."""
    return {
        step.slot: Feeder(folder, step.slot, step.stage.every, step.stage.tracker())
        for step in plan.steps
        if isinstance(step.stage, TrackerStage)
    }


def follow(feeder: Feeder) -> None:
    """Feed until standard input says that the run has ended, or ends itself."""
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], LOOK_SECONDS)
        if ready:
            word = sys.stdin.readline().strip()
            outcomes: dict[str, Outcome] = {"finished": "finished", "stopped": "stopped"}
            feeder.close(outcomes.get(word, "failed"))
            return
        feeder.feed()


def main(folder: Path, slot: str) -> int:
    """Feed the tracker of a slot to the end of the run. Returns the exit code."""
    guard()
    said, sys.stdout = sys.stdout, sys.stderr  # libraries print what nobody has asked for
    try:
        plan = make_plan(load_recipe(folder / rundir.RECIPE), ran=True)
        feeder = feeders(folder, plan)[slot]
        feeder.open(facts_of(folder, plan.recipe))
        follow(feeder)
    except Exception as error:
        where = folder / FOLDER / f"{slot}.txt"
        with contextlib.suppress(OSError):
            replace_text(where, shown("".join(traceback.format_exception(error))))
        why = in_words(error).splitlines()[0]
        print(f"tracking has ended: {why} (more in {where})", file=said, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))

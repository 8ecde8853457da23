"""Feeding a tracker what is new in a run's folder, and the process that does so during the run.

It gets the run as a RunSpec. A word on standard input says how the run has ended; so does its end,
when rank 0 has died. From then on the process has so many seconds. Whatever it prints is shown as
warnings.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.chain.plan import PlannedSlot
from pipeline.contracts.metrics import UNSENT, is_record, kind_of, numbers, record_training
from pipeline.contracts.stage import ENVIRONMENT_FILE
from pipeline.distributed.signals import ignore_signals
from pipeline.errors import in_words
from pipeline.execution import rundir
from pipeline.execution.run_spec import RunSpec
from pipeline.recipe.nodes import mapped
from pipeline.track.stage import Outcome, RunFacts, Tracker, TrackerStage
from pipeline.utils.files import opened, private_folder, replace_text, wait_for_lock
from pipeline.utils.foreign import Tail, json_object
from pipeline.utils.processes import received
from pipeline.utils.terminal import hide_environment, redact_output, shown

FOLDER = "trackers"
KEEP_SECONDS = 1.0
"""Seconds of sending between two writes of what has been sent."""
LOOK_SECONDS = 1.0
"""Seconds between two looks at the run's folder."""
OUTCOMES: dict[bytes, Outcome] = {b"finished": "finished", b"stopped": "stopped"}


@dataclass(eq=False)
class Feeder:
    """Sends what is new in a run's folder to a tracker, and remembers what was sent."""

    folder: Path
    slot: str
    every: int
    tracker: Tracker
    steps: int = field(default=0, init=False)
    """Number of steps that were sent, at least in part."""
    _newest: dict[str, dict[str, int]] = field(default_factory=dict, init=False)
    """Training -> kind of record -> step of the newest one that was sent; evaluations come after
    the steps, and anomalies have the number of the step that failed."""
    _rollbacks: list[Mapping[str, Any]] = field(default_factory=list, init=False)
    """Records of rollbacks, after which steps come again with other numbers."""
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
        sent = kept.get("sent", {})
        self._newest = {"": sent.get("newest", {}), **sent.get("further", {})}
        self._rollbacks = sent.get("rollbacks", [])
        self._state = self.tracker.open(run, kept.get("state", {}))
        self._keep()

    def feed(self) -> None:
        """Send what is new, and keep in mind that it was sent."""
        new = [record for record in self._tail.read() if is_record(record)]
        try:
            for record in new:
                step, kind = record.get("step") or 0, kind_of(record)
                newest = self._newest.setdefault(record_training(record), {})
                rollback = kind == "anomaly" and record.get("action") == "rollback"
                if rollback and record not in self._rollbacks:
                    # nothing from its step on counts as sent; one that a resumed run repeats counts
                    # too: the numbers before it have been repeated, and maybe sent
                    self._rollbacks.append(record)
                    newest |= {name: min(sent, step - 1) for name, sent in newest.items()}
                if kind == "other":  # several plugins may write records of the same step
                    kind = " ".join(sorted(name for name, _ in _measurements(record)))
                if step > newest.get(kind, -1):
                    self._send(step, record)
                    newest[kind] = step
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
        prefix = f"{record_training(record)}/" if record_training(record) else ""
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
        further = dict(self._newest)
        first = further.pop("", {})
        sent = {"newest": first, "rollbacks": self._rollbacks, "further": further}
        replace_text(self._file, json.dumps({"sent": sent, "state": dict(self._state)}))


def _measurements(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield names and values of a record's numbers; numbers of evaluations as `eval/loss`."""
    for name, value in numbers(record):
        if name not in UNSENT:
            yield ("eval/loss" if name == "eval_loss" else name), value


def facts_of(folder: Path, recipe: Mapping[str, Any]) -> RunFacts:
    """The facts of a run in `folder`, as others may see them. `recipe` has its public values."""
    return RunFacts(
        name=folder.resolve().name,
        recipe=mapped(recipe, lambda one: shown(one) if isinstance(one, str) else one),
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


def feeders(folder: Path, slots: Sequence[PlannedSlot]) -> dict[str, Feeder]:
    """Slot -> feeder of its tracker, of a run in `folder`."""
    return {
        planned.slot: Feeder(folder, planned.slot, planned.stage.every, planned.stage.tracker())
        for planned in slots
        if isinstance(planned.stage, TrackerStage)
    }


def main(spec: RunSpec, slot: str, seconds: float) -> int:
    """Feed the tracker of a slot to the end of a run, and `seconds` longer: the system ends this
    process also in a call that never returns. Returns the exit code."""
    ignore_signals()  # the run's end is what ends it
    # libraries print what nobody asked for, and what they start would keep it open
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    redact_output()
    hide_environment()
    ended, words, folder = threading.Event(), list[bytes](), Path(spec.run_dir)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def listen() -> None:
        words.append(os.read(0, 64).strip())  # sys.stdin could not be left as it is at the end
        signal.setitimer(signal.ITIMER_REAL, seconds)
        ended.set()

    threading.Thread(target=listen, name="pipe-ending", daemon=True).start()
    try:
        feeder = feeders(folder, spec.build()[1])[slot]
        with feeder.alone():
            feeder.open(facts_of(folder, spec.recipe))
            while not ended.wait(LOOK_SECONDS):
                feeder.feed()
            feeder.close(OUTCOMES.get(words[0], "failed"))
    except Exception as error:
        with contextlib.suppress(OSError):  # rank 0 may be gone
            rest = f"`pipe track {shlex.quote(str(folder))}` sends the rest"
            print(f"{failure(folder, slot, error)}; {rest}", file=said, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    given = received(sys.argv[1])
    sys.exit(main(RunSpec.load(given["spec"]), given["slot"], given["seconds"]))

"""A run by its folder: while it continues, and all that the folder says of it."""

from __future__ import annotations

import heapq
import itertools
import operator
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pipeline.chain.artifacts import trains
from pipeline.chain.registry import Registry
from pipeline.contracts.metrics import is_record, records
from pipeline.contracts.stage import ENVIRONMENT_FILE, engine_file
from pipeline.errors import RecipeError
from pipeline.execution import failures, rundir
from pipeline.execution.journal import Journal, is_event
from pipeline.execution.rank_logging import ACTIVITY_FILE
from pipeline.execution.run_state import ENDS, RunState, SlotState, Training
from pipeline.recipe import Recipe, read_recipe
from pipeline.utils.foreign import Tail, fitting, is_number, is_text, json_object
from pipeline.utils.text import plural

Ended = Literal["running", "finished", "failed", "stopped"]
LOOK_SECONDS = 0.5
"""Seconds between two looks at the folder of a run that is followed."""
KEPT = 1000
"""Newest records of a training that are kept of a run that is followed."""
NEWEST_BYTES = 1 << 20
"""Bytes of `metrics.jsonl` that are read of a run that began earlier."""
PACES = 20
"""Newest steps over whose time a mean is taken."""
Kinds = Mapping[str, Callable[[Any], bool]]
SURROUNDINGS: Kinds = {
    "command": lambda value: isinstance(value, list),
    "packages": lambda value: isinstance(value, dict),
}
PLANNED: Kinds = {"needed_bytes": is_number, "lines": lambda value: isinstance(value, list)}
DOING: Kinds = {
    "name": is_text,
    "unit": is_text,
    "done": is_number,
    "seconds": is_number,
    "total": lambda value: value is None or is_number(value),
}


def json_in(file: Path, kinds: Kinds) -> dict[str, Any]:
    """The JSON object in a file, without entries of `kinds` that are of another kind; an empty one
    where there is none."""
    return fitting(json_object(file, within=file.parent), kinds)


class Run:
    """A run as it is now; `look` brings it up to date."""

    def __init__(self, folder: Path, uses: Mapping[str, str]) -> None:
        """`uses` has the name of each slot's stage, in order."""
        self.folder, self.uses = folder, uses
        self.now = RunState(KEPT)
        self._journal = Tail(folder / rundir.JOURNAL)
        self._metrics = Tail(folder / rundir.METRICS, newest_bytes=NEWEST_BYTES)

    def look(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], bool]:
        """Read what is new. Returns events, records, and whether the records begin with earlier
        ones: from earlier starts, or returned before."""
        events = [event for event in self._journal.read() if is_event(event)]
        first = not self._metrics.began
        found = [record for record in self._metrics.read() if is_record(record)]
        if self._metrics.replaced:  # a resumed run has dropped steps that it repeats
            self.now.trainings.clear()
        self._apply(events, found)
        return events, found, first or self._metrics.replaced

    def _apply(self, events: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> None:
        """Apply all by time, each in its own order; one without a time follows its neighbour."""
        timed = []
        for rows in (events, found):
            times = (float(one.get("time") or 0) for one in rows)
            timed.append(zip(itertools.accumulate(times, max), rows, strict=True))
        for _, one in heapq.merge(*timed, key=operator.itemgetter(0)):
            self.now.apply(one)
        if self.state != "running":
            self.now.end_silently()

    @property
    def slots(self) -> dict[str, SlotState]:
        """The recipe's slots, in order."""
        return {slot: self.now.slots.get(slot, SlotState()) for slot in self.uses}

    @property
    def training(self) -> Training:
        """The newest training."""
        return next(reversed(self.now.trainings.values()), Training())

    @property
    def whole(self) -> bool:
        """Whether all records were read: of a run that began earlier, only the newest are."""
        return self._metrics.whole

    @property
    def state(self) -> Ended:
        """Whether the run is under way, and how it ended if not."""
        return "running" if rundir.is_locked(self.folder) else ended(self.folder, self.now)

    def activity(self) -> dict[str, Any]:
        """The activity of rank 0: `name`, `done`, `total`, `unit`, `seconds`; empty if it has not
        said so, or if the run is not under way: a killed rank leaves its file there."""
        if self.state != "running":
            return {}
        found = json_in(self.folder / ACTIVITY_FILE, DOING)
        return found if found.keys() >= DOING.keys() else {}

    @property
    def seconds(self) -> float:
        """Seconds of the newest start of the run, so far or to its end."""
        started = self.now.started
        return max(0.0, (self.now.ended or time.time()) - started) if started else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last step at the mean speed of the newest steps; None if not known, or
        if the training has ended."""
        step = self.training.step
        if self.training.ended_early or self.state == "finished" or "total_steps" not in step:
            return None
        paces = [one["step_seconds"] for one in self.training.steps if one.get("step_seconds")]
        left = step["total_steps"] - step["step"]
        return float(left * statistics.fmean(paces[-PACES:])) if paces else None


def ended(folder: Path, state: RunState) -> Ended:
    """How a run that is not under way has ended."""
    newest = state.events[-1]["event"] if state.events else None
    if newest == "run finished":
        return "finished"
    # under another launcher, rank 0 may be stopped before it can say that another one failed
    undone = (folder / failures.FOLDER / failures.UNDONE).exists()  # the run is as it was
    failed = newest == "run failed" or (failures.first_rank(folder) is not None and not undone)
    return "failed" if failed else "stopped"


class History(Run):
    """All that a run's folder says of it: for reports, comparisons and other programs."""

    def __init__(self, folder: Path, *, ended: bool = False) -> None:
        """Read the folder; with `ended` it is known that nothing continues there. Raises UsageError
        if it holds no run, RecipeError if its recipe cannot be read, and JournalDamaged."""
        self.recipe = recipe_in(folder)
        super().__init__(folder, self.recipe.uses)
        self._over, self.now = ended, RunState()
        events = Journal(folder / rundir.JOURNAL).events()
        self._apply(events, list(records(folder / rundir.METRICS)))
        self.environment: Mapping[str, Any] = json_in(folder / ENVIRONMENT_FILE, SURROUNDINGS)
        """Packages and machine of the newest start; empty if not known."""
        self.engines: Mapping[str, Mapping[str, Any]] = {
            slot: json_in(folder / engine_file(slot), {})
            for slot in ("", *self.recipe.stages)
            if (folder / engine_file(slot)).is_file()
        }
        """Facts of the live engine of each training that has begun, by its slot (empty: the
        recipe's first)."""
        found = self.now.trainings
        self.trainings = [found.get("", Training())]
        """The trainings that have begun, in order; at least one. Several have their slots as
        labels."""
        if not found.keys() <= {""}:
            first, *others = slots_that_train(self.uses) or ("the first training",)
            for key, training in found.items():
                training.label = key or first
            keys = dict.fromkeys(["", *others, *found])
            self.trainings = [found[key] for key in keys if key in found]

    @property
    def state(self) -> Ended:
        return ended(self.folder, self.now) if self._over else super().state

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return self.folder.resolve().name

    @property
    def events(self) -> list[dict[str, Any]]:
        """Lines of the journal that count, in order; a start that was killed has an end too."""
        return self.now.events

    @property
    def starts(self) -> list[dict[str, Any]]:
        """Events of the run's starts."""
        return [event for event in self.events if event["event"] == "run started"]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Records of `metrics.jsonl`, training by training."""
        return [record for one in self.trainings for record in one.records]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Records of steps, of the newest training."""
        return self.trainings[-1].steps

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Records of evaluations, of the newest training."""
        return self.trainings[-1].evaluations

    @property
    def best(self) -> dict[str, Any] | None:
        """Lowest held-out loss of the newest training, `eval_loss`, and its `step`, if any."""
        return self.trainings[-1].best

    @property
    def busy_seconds(self) -> float:
        """Seconds that all starts of the run took together."""
        total, began = 0.0, None
        for event in self.events:
            if event["event"] == "run started":
                began = event["time"]
            elif event["event"] in ENDS and began is not None:
                total, began = total + event["time"] - began, None
        if began is not None and self.state == "running":
            total += max(0.0, time.time() - began)
        return total

    @property
    def where(self) -> str:
        """Strategy of each training, processes and device: `fully_shard, 8 processes, cuda`."""
        newest = self.starts[-1] if self.starts else {}
        engines = [*self.engines.values()]
        kinds = " then ".join(dict.fromkeys(str(one.get("engine", "")) for one in engines))
        procs = plural(newest["procs"], "process") if "procs" in newest else ""
        device = next((str(one["device"]) for one in engines if "device" in one), "")
        return ", ".join(filter(None, (kinds, procs, device or str(newest.get("device", "")))))


def recipe_in(folder: Path) -> Recipe:
    """The recipe of the run in a folder, also where variables that it names are not set. Raises
    UsageError if it holds no run, and RecipeError if the recipe cannot be read."""
    recipe, problems = read_recipe(rundir.existing(folder) / rundir.RECIPE)
    if recipe is None:
        raise RecipeError(problems)
    return recipe


def slots_that_train(uses: Mapping[str, str]) -> list[str]:
    """The slots that train, of slots with the names of their stages, without those whose stage is
    not installed here."""
    registry = Registry.installed()
    return [slot for slot, use in uses.items() if trains(registry.find(use))]

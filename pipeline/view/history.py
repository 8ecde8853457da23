"""All that a run's folder says of the run: for reports, comparisons and lists of runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.contracts.stage import ENVIRONMENT_FILE, engine_file
from pipeline.errors import RecipeError
from pipeline.execution import failures, rundir
from pipeline.execution.journal import Journal
from pipeline.execution.metrics import records
from pipeline.recipe import Recipe, read_recipe
from pipeline.utils.foreign import fitting, is_number, is_text, json_object
from pipeline.view.trainings import Training, slots_that_train, trainings_in

State = Literal["waiting", "running", "finished", "failed", "stopped"]
ENDS: Mapping[str, State] = {
    "run failed": "failed",
    "run stopped": "stopped",
    "run finished": "finished",
}
"""Events that end a start of a run -> what becomes of the slot that was running."""


@dataclass(kw_only=True)
class SlotState:
    """One slot of a run, as its journal has it."""

    slot: str
    use: str
    """Name of its stage."""
    state: State = "waiting"
    began: float = 0.0
    """Time of its newest start, in seconds since 1970; 0 before the first."""
    seconds: float = 0.0
    """Seconds that its newest finished pass took."""
    total_seconds: float = 0.0
    """Seconds of all its passes, as far as they came."""


class Chain:
    """The slots of a run in order, brought up to date event by event."""

    def __init__(self, slots: Mapping[str, str]) -> None:
        """Take slot names with the names of their stages, in order."""
        self.slots = {slot: SlotState(slot=slot, use=use) for slot, use in slots.items()}
        self.started = 0.0
        """Time of the newest start of the run, in seconds since 1970; 0 before the first."""
        self.ended = 0.0
        """Time at which that ended; 0 if it has not."""
        self._newest = 0.0

    def update(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take note of journal events. A slot that the recipe no longer has is passed over."""
        for event in events:
            kind, slot = event["event"], self.slots.get(event.get("slot", ""))
            if kind == "run started":
                self._leave("waiting", self._newest)  # that start was killed
                self.started, self.ended = event["time"], 0.0
                for each in self.slots.values():
                    each.state = "waiting" if each.state in ("failed", "stopped") else each.state
            elif kind in ENDS:
                self.ended = event["time"]
                self._leave(ENDS[kind], event["time"])
            elif kind == "slot set aside" and slot is not None:
                slot.state = "waiting"
            elif kind == "slot started" and slot is not None:
                slot.state, slot.began = "running", event["time"]
            elif kind == "slot finished" and slot is not None:
                slot.seconds = event.get("seconds", event["time"] - slot.began)
                slot.total_seconds += slot.seconds
                slot.state = "finished"
            self._newest = event["time"]

    def end_silently(self, now: float) -> None:
        """Note that the newest start was killed, and has lived until `now` at least."""
        if self.started and not self.ended:
            self.ended = max(self._newest, now)
            self._leave("stopped", self.ended)

    def _leave(self, state: State, now: float) -> None:
        """End the slot that is running, which has not finished."""
        for slot in self.slots.values():
            if slot.state == "running":
                slot.state = state
                slot.total_seconds += max(0.0, now - slot.began)

    @property
    def running(self) -> SlotState | None:
        """The slot that is running, if one is."""
        return next((slot for slot in self.slots.values() if slot.state == "running"), None)


PLAN_FILE = "plan.json"
"""The plan of a run, in its folder: `needed_bytes` of a GPU, `lines` for people."""
SILENT = "no end was recorded: the run was killed, or its machine went down"
RunState = Literal["running", "finished", "failed", "stopped"]


@dataclass(frozen=True, kw_only=True)
class History:
    """A run's events and measurements so far."""

    folder: Path
    recipe: Recipe
    state: RunState
    events: list[dict[str, Any]]
    """Lines of the journal, in order; a start that was killed has an end too (`with_ends`)."""
    metrics: list[dict[str, Any]]
    """Records of `metrics.jsonl`, in order."""
    chain: Chain
    environment: Mapping[str, Any]
    """Packages and machine of the newest start; empty if not known."""
    engines: Mapping[str, Mapping[str, Any]]
    """Facts of the live engine of each training that has begun, by its slot (empty: the recipe's
    first)."""

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return self.folder.resolve().name

    @property
    def slots(self) -> dict[str, str]:
        """Slot -> name of its stage, in order."""
        return {slot: spec.use for slot, spec in self.recipe.stages.items()}

    @functools.cached_property
    def trainings(self) -> list[Training]:
        """The trainings that have begun, in order; at least one."""
        return trainings_in(self.metrics, lambda: slots_that_train(self.slots))

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
        """Lowest held-out loss of the newest training, `eval_loss`, and its `step`; None before an
        evaluation."""
        return self.trainings[-1].best


def read_history(folder: Path, *, ended: bool = False) -> History:
    """Read a run's folder; with `ended` it is known that nothing goes on there. Raises UsageError
    if it holds no run, RecipeError if its recipe cannot be read, and JournalDamaged. A recipe that
    names variables which are not set here is read."""
    rundir.existing(folder)
    recipe, problems = read_recipe(folder / rundir.RECIPE)
    if recipe is None:
        raise RecipeError(problems)
    journal = Journal(folder / rundir.JOURNAL).events()
    metrics = list(records(folder / rundir.METRICS))
    state = state_of(folder, journal, ended=ended)
    events = [*with_ends(journal, metrics, running=state == "running")]
    chain = Chain({slot: spec.use for slot, spec in recipe.stages.items()})
    chain.update(events)
    return History(
        folder=folder,
        recipe=recipe,
        state=state,
        events=events,
        metrics=metrics,
        chain=chain,
        environment=json_in(folder / ENVIRONMENT_FILE, SURROUNDINGS),
        engines={
            slot: json_in(folder / engine_file(slot), {})
            for slot in ("", *recipe.stages)
            if (folder / engine_file(slot)).is_file()
        },
    )


def with_ends(
    events: Iterable[dict[str, Any]], metrics: Iterable[Mapping[str, Any]], *, running: bool
) -> Iterator[dict[str, Any]]:
    """Yield journal events, and behind each start that did not record its end, because it was
    killed, a stop at its last sign of life in either file. `running`: whether the newest start is
    under way."""
    times = [record["time"] for record in metrics if isinstance(record.get("time"), float)]
    under_way, last = False, 0.0
    for event in events:
        if event["event"] == "run started":
            if under_way:
                yield _silent_end(last, times, event["time"])
            under_way = True
        elif event["event"] in ENDS:
            under_way = False
        last = event["time"]
        yield event
    if under_way and not running:
        yield _silent_end(last, times, math.inf)


def _silent_end(last: float, times: Iterable[float], limit: float) -> dict[str, Any]:
    newest = max([last, *(time for time in times if time < limit)])
    return {"event": "run stopped", "time": newest, "problem": SILENT}


def state_of(folder: Path, events: list[dict[str, Any]], *, ended: bool = False) -> RunState:
    """Return whether a run is under way, and how it ended if not, or if it is known to have
    `ended`."""
    if not ended and rundir.is_locked(folder):
        return "running"
    newest = events[-1]["event"] if events else None
    if newest == "run finished":
        return "finished"
    # under another launcher, rank 0 may be stopped before it can say that another one failed
    failed = newest == "run failed" or failures.in_force(folder)
    return "failed" if failed else "stopped"


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
    """Return the JSON object in a file, without entries of `kinds` that are of another kind; an
    empty one where there is none."""
    return fitting(json_object(file, within=file.parent), kinds)

"""What of a plan is left to do, by the run's journal. Imports no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.artifacts import Durable
from pipeline.errors import StageError
from pipeline.journal import Finished, Journal

if TYPE_CHECKING:
    from pipeline.plan import Plan, Step


@dataclass(frozen=True, kw_only=True)
class Todo:
    """Slots to run, and records to restore those finished slots from that they read."""

    run: frozenset[str]
    restore: Mapping[str, Mapping[str, Any]]

    def dump(self) -> str:
        """As JSON text, for the other ranks."""
        return json.dumps({"run": sorted(self.run), "restore": self.restore})

    @classmethod
    def load(cls, text: str) -> Todo:
        """The reverse of `dump`."""
        facts = json.loads(text)
        return cls(run=frozenset(facts["run"]), restore=facts["restore"])


def decide(plan: Plan, journal: Journal, log: logging.Logger | None = None) -> Todo:
    """Go through the plan backwards: a slot runs if it has not finished as it now stands, or if a
    slot that runs reads its result and that is on no disk. `log` is told of lost results."""
    finished = _finished(plan, journal)
    run: set[str] = set()
    restore: dict[str, Mapping[str, Any]] = {}
    for step in reversed(plan.steps):
        done = finished.get(step.slot)
        readers = [other.slot for other in plan.steps if step.slot in other.inputs.values()]
        wanted = not run.isdisjoint(readers)
        if done is None or (wanted and done.record is None):
            run.add(step.slot)
        elif done.record is not None and (wanted or not readers):
            problem = _lost(step, done.record)
            if problem:
                run.add(step.slot)
                if log is not None:
                    log.warning("slot `%s` runs again: %s", step.slot, problem)
            elif wanted:
                restore[step.slot] = done.record
    return Todo(run=frozenset(run), restore=restore)


def restored(step: Step, record: Mapping[str, Any]) -> Durable:
    """A finished slot's artifact. Raises StageError when it is gone."""
    assert step.gives is not None
    assert issubclass(step.gives, Durable)
    return step.gives.restore(record)


def results(plan: Plan, journal: Journal) -> Iterator[tuple[str, Path]]:
    """Slot and place of every durable result that lies on disk."""
    finished = _finished(plan, journal)
    for step in plan.steps:
        done = finished.get(step.slot)
        values = [] if done is None or done.record is None else done.record.values()
        paths = [Path(value) for value in values if isinstance(value, str)]
        place = next((path for path in paths if path.is_absolute() and path.exists()), None)
        if place is not None:
            yield step.slot, place


def digests(plan: Plan) -> dict[str, str]:
    """For each slot a digest over its settings, the seed, and the slots it depends on."""
    found: dict[str, str] = {}
    for step in plan.steps:
        sources = {
            parameter: found[slot] for parameter, slot in step.inputs.items() if slot is not None
        }
        facts: Mapping[str, Any] = {
            "use": step.use,
            "settings": dataclasses.asdict(step.stage),
            "seed": plan.recipe.seed,
            "inputs": sources,
        }
        text = json.dumps(facts, sort_keys=True, default=str)
        found[step.slot] = hashlib.sha256(text.encode()).hexdigest()
    return found


def _finished(plan: Plan, journal: Journal) -> dict[str, Finished]:
    """Finishes that still count: the slot and all it depends on are as they were."""
    now = digests(plan)
    return {
        slot: finish
        for slot, finish in journal.finished().items()
        if finish.digest == now.get(slot)
    }


def _lost(step: Step, record: Mapping[str, Any]) -> str:
    """Why the recorded result cannot be had; empty when it can."""
    try:
        restored(step, record)
    except StageError as error:
        return str(error)
    return ""

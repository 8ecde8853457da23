"""The part of a plan that is left to run: by the journal, and by --from, --until and --only.

Imports no torch."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.chain.plan import resolved
from pipeline.contracts.export import ExportedModel
from pipeline.contracts.stage import Durable, VerifiesResult
from pipeline.errors import PipeError, UsageError, in_words
from pipeline.execution import rundir
from pipeline.execution.journal import Journal
from pipeline.execution.run_state import Finished
from pipeline.utils.text import align, did_you_mean, plural

if TYPE_CHECKING:
    from pipeline.chain.plan import Plan, PlannedSlot


@dataclass(frozen=True, kw_only=True)
class ResumePlan:
    """Slots to run, and records from which the finished slots that they read are restored."""

    run: frozenset[str]
    restore: Mapping[str, Mapping[str, Any]]

    def dump(self) -> str:
        """JSON text for the other ranks."""
        return json.dumps({"run": sorted(self.run), "restore": self.restore})

    @classmethod
    def load(cls, text: str) -> ResumePlan:
        """The reverse of `dump`."""
        facts = json.loads(text)
        return cls(run=frozenset(facts["run"]), restore=facts["restore"])


def plan_resume(
    plan: Plan,
    journal: Journal,
    log: logging.Logger | None = None,
    *,
    thorough: bool = True,
    again: Collection[str] = (),
) -> ResumePlan:
    """Go through the plan backwards: a slot runs if it has not finished in its present form, or if
    a slot that runs reads its result and no disk has it. `log` gets a line for each lost result.
    Without `thorough`, the contents of results are not verified. Slots of `again` count as not
    finished."""
    found = finished_in(plan, journal)
    finished = {slot: done for slot, done in found.items() if slot not in again}
    slots = {planned.slot: planned for planned in plan.slots}
    records = {slot: done.record or {} for slot, done in finished.items()}

    @functools.cache
    def lost(slot: str) -> bool:
        problem = _problem(slots[slot], records[slot], thorough=thorough)
        if problem and log is not None:
            log.warning("slot `%s` runs again: %s", slot, problem)
        return bool(problem)

    while True:
        todo = _needed(plan, finished, lost)
        slot = _live_again(plan, todo)
        if slot is None:
            return todo
        del finished[slot]


def _needed(
    plan: Plan, finished: Mapping[str, Finished], lost: Callable[[str], bool]
) -> ResumePlan:
    """Slots that have not finished, and the slots that they read."""
    run: set[str] = set()
    restore: dict[str, Mapping[str, Any]] = {}
    for planned in reversed(plan.slots):
        done = finished.get(planned.slot)
        readers = _readers(plan, planned)
        wanted = not run.isdisjoint(readers)
        if done is None or (wanted and done.record is None):
            run.add(planned.slot)
        elif done.record is not None and (wanted or not readers or _is_kept(planned, done.record)):
            if lost(planned.slot):
                run.add(planned.slot)
            elif wanted:
                restore[planned.slot] = done.record
    return ResumePlan(run=frozenset(run), restore=restore)


def _live_again(plan: Plan, todo: ResumePlan) -> str | None:
    """Return a finished slot whose work was only in memory and which later slots that now run may
    need: no slot reads its result, and nothing of it is on disk. A slot that would be the only one
    to need a model does not count."""
    durable = {
        planned.slot
        for planned in plan.slots
        if planned.gives and issubclass(planned.gives, Durable)
    }
    for number, planned in enumerate(plan.slots):
        taken = {slot for slot in planned.inputs.values() if slot is not None}
        live = taken - durable
        made_again = live <= todo.run if live or not taken else not taken.isdisjoint(todo.run)
        behind = {other.slot for other in plan.slots[number + 1 :]}
        if (
            planned.slot not in todo.run | durable
            and not _readers(plan, planned)
            and made_again
            and not behind.isdisjoint(todo.run)
        ):
            return planned.slot
    return None


def _readers(plan: Plan, planned: PlannedSlot) -> list[str]:
    return [other.slot for other in plan.slots if planned.slot in other.inputs.values()]


def _is_kept(planned: PlannedSlot, record: Mapping[str, Any]) -> bool:
    """Whether the result is what the run is for, and has not been removed on purpose."""
    return (
        planned.gives is not None
        and issubclass(planned.gives, ExportedModel)
        and bool(_place(record))
    )


def restored(planned: PlannedSlot, record: Mapping[str, Any]) -> Durable:
    """A finished slot's artifact. Raises StageError when it is gone."""
    assert planned.gives is not None
    assert issubclass(planned.gives, Durable)
    return planned.gives.restore(record)


def results(plan: Plan, journal: Journal) -> Iterator[tuple[str, Path]]:
    """Slot and place of every durable result that lies on disk."""
    finished = finished_in(plan, journal)
    for planned in plan.slots:
        done = finished.get(planned.slot)
        place = None if done is None else _place(done.record or {})
        if place is not None:
            yield planned.slot, place


def _place(record: Mapping[str, Any]) -> Path | None:
    """Place of the recorded result on this machine; None elsewhere."""
    paths = [Path(value) for value in record.values() if isinstance(value, str)]
    return next((path for path in paths if path.is_absolute() and path.exists()), None)


def digests(plan: Plan) -> dict[str, str]:
    """Slot -> digest over its settings, the seed, and the slots it depends on."""
    found: dict[str, str] = {}
    for planned in plan.slots:
        sources = {
            parameter: found[slot] for parameter, slot in planned.inputs.items() if slot is not None
        }
        facts: Mapping[str, Any] = {
            "use": planned.use,
            "settings": dataclasses.asdict(planned.stage),
            "seed": plan.recipe.seed,
            "inputs": sources,
        }
        text = json.dumps(facts, sort_keys=True, default=str)
        found[planned.slot] = hashlib.sha256(text.encode()).hexdigest()
    return found


def finished_in(plan: Plan, journal: Journal) -> dict[str, Finished]:
    """Finished slots that have not changed, and neither have the slots that they depend on."""
    now = digests(plan)
    return {
        slot: finish
        for slot, finish in journal.state().finished.items()
        if finish.digest == now.get(slot)
    }


def _problem(planned: PlannedSlot, record: Mapping[str, Any], *, thorough: bool) -> str:
    """Return why the recorded result is missing or has changed; empty if it is unchanged."""
    try:
        result = restored(planned, record)
        if thorough and isinstance(planned.stage, VerifiesResult):
            planned.stage.verify_result(result)
    except (PipeError, OSError) as error:
        return in_words(error)
    except (KeyError, TypeError, ValueError) as error:
        return f"its record is of another version: {in_words(error)}"
    return ""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Slots that a person has named. None: no restriction."""

    first: str | None = None
    """Run this slot and all later slots again, finished or not."""
    last: str | None = None
    """End after this slot."""
    only: str | None = None
    """Run this slot, finished or not, and end after it; before it, what has not finished."""

    def __post_init__(self) -> None:
        """Raise UsageError for slots that exclude each other."""
        if self.only is not None and (self.first or self.last):
            raise UsageError("--only excludes --from and --until")

    def again(self, plan: Plan) -> list[str]:
        """Return the slots that are to run even if they have finished. Raises UsageError for a slot
        that the plan does not have, and for a range that has none."""
        order = [planned.slot for planned in plan.slots]
        for slot in filter(None, (self.first, self.last, self.only)):
            _require(slot, order)
        if self.only is not None:
            return [self.only]
        if self.first is None:
            return []
        if self.last and order.index(self.first) > order.index(self.last):
            raise UsageError(f"--from {self.first} comes after --until {self.last}")
        return order[order.index(self.first) :]

    def of(self, plan: Plan) -> Plan:
        """Return the part of the plan that is done."""
        return plan.until(self.only or self.last)

    def set_aside(self, plan: Plan, journal: Journal) -> None:
        """Note in the journal which of the slots that have finished are to run again. Raises as
        `again` does."""
        known = journal.state().finished
        for slot in self.again(plan):
            if slot in known:
                journal.write("slot set aside", slot=slot)


def _require(slot: str, order: list[str]) -> None:
    if slot not in order:
        raise UsageError(f"the recipe has no slot `{slot}`", hint=did_you_mean(slot, order))


def ends_early(plan: Plan) -> str | None:
    """Return the slot after which a start under a plan ends, if others follow in the recipe."""
    last = plan.slots[-1].slot
    return None if last == list(plan.recipe.stages)[-1] else last


def preview_lines(plan: Plan, folder: Path | None, selection: Selection) -> Iterator[str]:
    """Yield lines for people: each slot, whether it would run, and why not. `folder` is the run's,
    if it has one already. Raises UsageError for a slot that the plan does not have."""
    journal = Journal((folder or Path("a run that is not there")) / rundir.JOURNAL)
    plan = resolved(plan, journal.state().commits, ask=False)
    chosen = selection.of(plan)
    todo = plan_resume(chosen, journal, thorough=False, again=selection.again(plan))
    view = plan.view
    yield f"{plan.recipe.name}: {plural(view.procs, 'process')}, {view.device}"
    rows = []
    for planned in plan.slots:
        if planned.slot in todo.run:
            what = "would run"
        elif planned not in chosen.slots:
            what = "is left out"
        else:
            what = "has finished"
        rows.append((planned.slot, planned.use, what))
    yield from align(rows, left=3)
    yield "nothing was started"

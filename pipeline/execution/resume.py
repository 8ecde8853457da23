"""The part of a plan that is left to run: by the journal, and by --from, --until and --only.

Imports no torch."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.chain.plan import Plan, PlannedSlot, resolved
from pipeline.contracts.export import ExportedModel
from pipeline.contracts.stage import Durable, VerifiesResult
from pipeline.errors import PipeError, UsageError, in_words
from pipeline.execution import rundir
from pipeline.execution.journal import Journal
from pipeline.execution.run_state import Finished
from pipeline.utils.text import align, did_you_mean, plural


@dataclass(frozen=True, kw_only=True)
class ResumePlan:
    """Slots to run, and records from which the finished slots that they read are restored."""

    run: frozenset[str]
    restore: Mapping[str, Mapping[str, Any]]
    lost: tuple[str, ...] = ()
    """A sentence for each slot that runs again since its result is gone or has changed."""


def plan_resume(
    plan: Plan, journal: Journal, *, thorough: bool = True, again: Collection[str] = ()
) -> ResumePlan:
    """Go through the plan backwards: a slot runs if it has not finished in its present form, or if
    a slot that runs reads its result and no disk has it. Without `thorough`, the contents of
    results are not verified, for which first all are looked at: a large one takes many minutes.
    Slots of `again` count as not finished."""
    found = finished_in(plan, journal)
    finished = {slot: done for slot, done in found.items() if slot not in again}
    readers = {
        one.slot: {other.slot for other in plan.slots if one.slot in other.inputs.values()}
        for one in plan.slots
    }

    slots, notes = {one.slot: one for one in plan.slots}, list[str]()

    @functools.cache
    def lost(slot: str, verify: bool) -> bool:
        if verify and lost(slot, False):
            return True
        problem = _problem(slots[slot], found[slot].record or {}, thorough=verify)
        notes.extend([f"slot `{slot}` runs again: {problem}"] if problem else [])
        return bool(problem)

    verify = False
    while True:
        run: set[str] = set()
        restore: dict[str, Mapping[str, Any]] = {}
        for slot, planned in reversed(slots.items()):
            done, wanted = finished.get(slot), not run.isdisjoint(readers[slot])
            record = None if done is None else done.record
            if done is None or (wanted and record is None):
                run.add(slot)
                continue
            # what a run is for is checked, unless it was removed on purpose
            exported = issubclass(planned.gives or object, ExportedModel) and _place(record or {})
            if record is not None and (wanted or not readers[slot] or exported):
                if lost(slot, verify):
                    run.add(slot)
                elif wanted:
                    restore[slot] = record
        needed = _needs_live_state(plan, run, readers)
        if needed is not None:
            del finished[needed]
        elif verify == thorough:
            return ResumePlan(run=frozenset(run), restore=restore, lost=tuple(notes))
        verify = verify or (thorough and needed is None)


def _needs_live_state(
    plan: Plan, run: Collection[str], readers: Mapping[str, Collection[str]]
) -> str | None:
    """A finished slot whose work was only in memory and which later slots that now run may need: no
    slot reads its result, and nothing of it is on disk. A slot that would be the only one to need a
    model does not count."""
    durable = {one.slot for one in plan.giving(Durable)}
    later = {one.slot for one in plan.slots}
    for planned in plan.slots:
        later.discard(planned.slot)
        taken = {slot for slot in planned.inputs.values() if slot is not None}
        live = taken - durable
        made_again = live.issubset(run) if live or not taken else not taken.isdisjoint(run)
        known = planned.slot in durable or planned.slot in run or readers[planned.slot]
        if not known and made_again and not later.isdisjoint(run):
            return planned.slot
    return None


def _problem(planned: PlannedSlot, record: Mapping[str, Any], *, thorough: bool) -> str:
    """Why the recorded result is missing or has changed; empty if it is unchanged."""
    try:
        assert planned.gives is not None
        assert issubclass(planned.gives, Durable)
        result = planned.gives.restore(record)
        if thorough and isinstance(planned.stage, VerifiesResult):
            planned.stage.verify_result(result)
    except (PipeError, OSError) as error:
        return in_words(error)
    except (KeyError, TypeError, ValueError) as error:
        return f"its record is of another version: {in_words(error)}"
    return ""


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
    paths = (Path(value) for value in record.values() if isinstance(value, str))
    return next((path for path in paths if path.is_absolute() and path.exists()), None)


def digests(plan: Plan) -> dict[str, str]:
    """Slot -> digest over its settings, the seed, and the slots it depends on."""
    found: dict[str, str] = {}
    for planned in plan.slots:
        facts = {
            "use": planned.use,
            "settings": dataclasses.asdict(planned.stage),
            "seed": plan.recipe.seed,
            "inputs": {name: found[slot] for name, slot in planned.inputs.items() if slot},
        }
        text = json.dumps(facts, sort_keys=True, default=str)
        found[planned.slot] = hashlib.sha256(text.encode()).hexdigest()
    return found


def finished_in(plan: Plan, journal: Journal) -> dict[str, Finished]:
    """Finished slots that have not changed, and neither have the slots that they depend on."""
    now, finished = digests(plan), journal.state().finished
    return {slot: one for slot, one in finished.items() if one.digest == now.get(slot)}


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

    def require_known(self, plan: Plan) -> None:
        """Raise UsageError for a slot that the plan lacks, and for a range that has none."""
        order = [planned.slot for planned in plan.slots]
        for slot in filter(None, (self.first, self.last, self.only)):
            if slot not in order:
                raise UsageError(f"the recipe has no slot `{slot}`", hint=did_you_mean(slot, order))
        if self.first and self.last and order.index(self.first) > order.index(self.last):
            raise UsageError(f"--from {self.first} comes after --until {self.last}")

    def again(self, plan: Plan) -> list[str]:
        """The slots that must run even if they have finished. Raises as `require_known` does."""
        self.require_known(plan)
        if self.first is None:
            return [self.only] if self.only is not None else []
        order = [planned.slot for planned in plan.slots]
        return order[order.index(self.first) :]

    def cut(self, plan: Plan) -> Plan:
        """The plan up to the last slot that is wanted."""
        return plan.until(self.only or self.last)

    def set_aside(self, plan: Plan, journal: Journal) -> None:
        """Note in the journal which of the slots that have finished are to run again. Raises as
        `require_known` does."""
        known = journal.state().finished
        for slot in self.again(plan):
            if slot in known:
                journal.write("slot set aside", slot=slot)


def ends_early(plan: Plan) -> str | None:
    """The slot after which a start under a plan ends, if others follow in the recipe."""
    last = plan.slots[-1].slot
    return None if last == list(plan.recipe.stages)[-1] else last


def preview_lines(plan: Plan, folder: Path | None, selection: Selection) -> Iterator[str]:
    """Yield lines for people: each slot, whether it would run, and why not. `folder` is the run's,
    if it has one already. Raises UsageError for a slot that the plan does not have."""
    journal = Journal((folder or Path("a run that is not there")) / rundir.JOURNAL)
    plan = resolved(plan, journal.state().commits, ask=False)
    chosen = selection.cut(plan)
    todo = plan_resume(chosen, journal, thorough=False, again=selection.again(plan))
    yield f"{plan.recipe.name}: {plural(plan.view.procs, 'process')}, {plan.view.device}"
    rows = []
    for planned in plan.slots:
        left_out = "has finished" if planned in chosen.slots else "is left out"
        what = "would run" if planned.slot in todo.run else left_out
        rows.append((planned.slot, planned.use, what))
    yield from align(rows, left=3)
    yield "nothing was started"

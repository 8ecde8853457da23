"""The files in a run's folder that no one needs any more, and their removal.

Nothing outside the folder is looked at, and no link is followed. A checkpoint gets another name
before its files go, so a removal that is cut short leaves a run as it is before or after it, and
something left over for the next.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.chain.artifacts import training_of
from pipeline.checkpoint import Retention, location
from pipeline.checkpoint.retention import unneeded
from pipeline.checkpoint.store import LocalStore, is_leftover
from pipeline.contracts.export import ExportedModel
from pipeline.contracts.traits import RetainsCheckpoints
from pipeline.errors import PipeError, in_words
from pipeline.execution import rundir
from pipeline.execution.export_recipe import EXPORTS
from pipeline.execution.journal import Journal

if TYPE_CHECKING:
    from pipeline.chain.plan import Plan

SUPERSEDED, LEFT_OVER, LAST = "superseded", "left over", "exported"
TEMPORARY = ("*.tmp", ".offload-*", "*.partial")
"""Names in a run's folder of files that a later step replaces or removes."""


@dataclass(frozen=True, kw_only=True)
class Removable:
    """A file or folder that can be removed."""

    path: Path
    why: str
    size: int

    def remove(self) -> None:
        """Remove it. Raises OSError."""
        if self.why != LEFT_OVER:
            LocalStore(self.path.parent).delete(self.path.name)
        elif self.path.is_dir():
            shutil.rmtree(self.path)
        else:
            self.path.unlink()


@dataclass(frozen=True, kw_only=True)
class CleanResult:
    """The files of a run that can be removed or have been, and why others stay."""

    waste: tuple[Removable, ...] = ()
    notes: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    """Reasons for which files that should have gone have stayed."""


def find(folder: Path, *, all_checkpoints: bool = False) -> CleanResult:
    """Look at a run that no one works on. With `all_checkpoints`, the last one goes too, if the
    run's model is exported. Raises JournalDamaged."""
    if _is_exported_from(folder):
        return CleanResult(notes=("is being exported: all of it stays",))
    journal = Journal(folder / rundir.JOURNAL)
    finished = journal.state().ended_well
    notes = [] if finished else ["has not finished: its checkpoints stay"]
    places = {"": location.default(folder)} | location.places(folder)
    elsewhere = {slot: _elsewhere(folder, slot, place) for slot, place in places.items()}
    here = {slot: Path(place) for slot, place in places.items() if not elsewhere[slot]}
    # an unfinished run goes on from partial exports
    left = [
        path for one in TEMPORARY[: None if finished else 1] for path in sorted(folder.glob(one))
    ]
    for place in filter(Path.is_dir, here.values()):  # writes and removals that were cut short
        left += [path for path in sorted(place.iterdir()) if is_leftover(path.name)]
    found = [_waste(path, LEFT_OVER) for path in left if not path.is_symlink()]
    if any(elsewhere.values()):
        notes = [note for note in elsewhere.values() if note]
    if finished and here:
        plan, problem = _plan(folder)
        if plan is None:
            notes.append(f"its checkpoints stay: {problem}")
        else:
            exported = _is_exported(plan, journal)
            if all_checkpoints and not exported:
                notes.append("its last checkpoint stays: there is no export of it")
            for slot, place in here.items():
                rules = _retention(plan, slot)
                everything = all_checkpoints and exported
                found += _checkpoints(place, rules, journal, everything=everything)
    return CleanResult(waste=tuple(found), notes=tuple(notes))


def clean(folder: Path, *, all_checkpoints: bool = False) -> CleanResult:
    """Remove what `find` finds, and return what has gone and what has not. Raises RunLocked for a
    run that is under way, and JournalDamaged."""
    with rundir.locked(folder):
        found = find(folder, all_checkpoints=all_checkpoints)
        gone, failures = [], []
        for waste in found.waste:
            if _is_exported_from(folder):
                failures.append("an export has begun: the rest stays")
                break
            try:
                waste.remove()
            except OSError as error:
                name = waste.path.relative_to(folder)
                failures.append(f"{name} could not be removed: {in_words(error)}")
            else:
                gone.append(waste)
    return CleanResult(waste=tuple(gone), notes=found.notes, failures=tuple(failures))


def _is_exported_from(folder: Path) -> bool:
    return any(rundir.is_locked(job) for job in (folder / EXPORTS).glob("*"))


def _elsewhere(folder: Path, training: str, place: str) -> str:
    """Say where a training's checkpoints are if they are not in the run's folder; empty if they
    are."""
    if place != location.default(folder, training):
        return f"its checkpoints are not in its folder, and stay: {place}"
    return f"its checkpoints stay: {place} is a link" if Path(place).is_symlink() else ""


def _checkpoints(
    place: Path, rules: Retention, journal: Journal, *, everything: bool
) -> Iterator[Removable]:
    """Yield the checkpoints of a training that a finished run does not need."""
    store = LocalStore(place)
    records = (done.record or {} for done in journal.state().finished.values())
    named = [Path(one) for record in records for one in record.values() if isinstance(one, str)]
    kept = {path.name for path in named if path.parent.name == place.name}
    superseded = {name for name in unneeded(store, rules) if name not in kept}
    for name in store.names():
        path = place / name
        if not path.is_symlink() and (everything or name in superseded):
            yield _waste(path, SUPERSEDED if name in superseded else LAST)


def _retention(plan: Plan, training: str) -> Retention:
    """Return the rules of a training's checkpoint stage, with one newest instead of several."""
    given = (
        one.stage.retention for one in plan.slots if isinstance(one.stage, RetainsCheckpoints)
        and training_of(plan.view.wiring, one.slot) == training
    )  # fmt: skip
    rules = next((one for one in given if isinstance(one, Retention)), Retention())
    return rules.model_copy(update={"last": 1})


def _plan(folder: Path) -> tuple[Plan | None, str]:
    from pipeline.chain.plan import make_plan
    from pipeline.recipe import load_recipe

    try:
        return make_plan(load_recipe(rundir.existing(folder) / rundir.RECIPE), skip_checks=True), ""
    except PipeError as error:
        return None, in_words(error).splitlines()[0]


def _is_exported(plan: Plan, journal: Journal) -> bool:
    """Whether the run's model lies on this machine, with all its files."""
    finished: Mapping[str, Any] = journal.state().finished
    for planned in plan.slots:
        if issubclass(planned.gives or object, ExportedModel):
            done = finished.get(planned.slot)
            with contextlib.suppress(PipeError, KeyError, TypeError):
                ExportedModel.restore(done.record if done else {})
                return True
    return False


def _waste(path: Path, why: str) -> Removable:
    inside = path.rglob("*") if path.is_dir() else iter(())
    return Removable(path=path, why=why, size=sum(one.lstat().st_size for one in (path, *inside)))

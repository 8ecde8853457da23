"""The files in a run's folder that no one needs any more, and their removal.

Nothing outside the folder is looked at, and no link is followed. A checkpoint gets another name
before its files go, so a removal that is cut short leaves a run as it is before or after it, and
something left over for the next.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.chain.artifacts import training_of
from pipeline.chain.plan import Plan, make_plan
from pipeline.checkpoint import Retention, location
from pipeline.checkpoint.location import unneeded
from pipeline.checkpoint.store import LEFTOVER, LocalStore
from pipeline.contracts.export import ExportedModel
from pipeline.contracts.traits import RetainsCheckpoints
from pipeline.errors import PipeError, in_words
from pipeline.execution import rundir
from pipeline.execution.export_recipe import EXPORTS
from pipeline.execution.journal import Journal
from pipeline.execution.run_state import Finished
from pipeline.recipe import load_recipe

SUPERSEDED, LEFT_OVER, LAST = "superseded", "left over", "exported"
TEMPORARY = ("*.tmp", ".offload-*", "*.partial")
"""Names in a run's folder of files that a later step replaces or removes."""


@dataclass(kw_only=True)
class Removable:
    """A file or folder that can be removed."""

    path: Path
    why: str
    size: int = field(init=False)
    """Bytes of it and of all that is in it."""

    def __post_init__(self) -> None:
        inside = self.path.rglob("*") if self.path.is_dir() else iter(())
        self.size = sum(one.lstat().st_size for one in (self.path, *inside))

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
    state = Journal(folder / rundir.JOURNAL).state()
    notes, here = [], dict[str, Path]()
    for slot, place in ({"": location.address(folder, None)} | location.places(folder)).items():
        if place != location.address(folder, None, slot):
            notes.append(f"its checkpoints are not in its folder, and stay: {place}")
        elif Path(place).is_symlink():
            notes.append(f"its checkpoints stay: {place} is a link")
        else:
            here[slot] = Path(place)
    if not state.ended_well and not notes:
        notes.append("has not finished: its checkpoints stay")
    # an unfinished run goes on from partial exports
    names = TEMPORARY if state.ended_well else TEMPORARY[:1]
    left = [path for name in names for path in sorted(folder.glob(name))]
    for own in filter(Path.is_dir, here.values()):  # writes and removals that were cut short
        left += [path for path in sorted(own.iterdir()) if LEFTOVER.fullmatch(path.name)]
    found = [Removable(path=path, why=LEFT_OVER) for path in left if not path.is_symlink()]
    if state.ended_well and here:
        try:
            recipe = load_recipe(rundir.existing(folder) / rundir.RECIPE)
            plan = make_plan(recipe, skip_checks=True)
        except PipeError as error:
            notes.append(f"its checkpoints stay: {in_words(error).splitlines()[0]}")
        else:
            exported = _is_exported(plan, state.finished)
            if all_checkpoints and not exported:
                notes.append("its last checkpoint stays: there is no export of it")
            for slot, own in here.items():
                everything = all_checkpoints and exported
                found += _checkpoints(plan, slot, own, state.finished, everything)
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


def _checkpoints(
    plan: Plan, training: str, place: Path, finished: dict[str, Finished], everything: bool
) -> Iterator[Removable]:
    """Yield the checkpoints of a training that a finished run does not need: by the rules of its
    checkpoint stage, with one newest instead of several."""
    given = (
        one.stage.retention for one in plan.slots if isinstance(one.stage, RetainsCheckpoints)
        and training_of(plan.view.wiring, one.slot) == training
    )  # fmt: skip
    rules = next((one for one in given if isinstance(one, Retention)), Retention())
    store, rules = LocalStore(place), rules.model_copy(update={"last": 1})
    records = (done.record or {} for done in finished.values())
    named = [Path(one) for record in records for one in record.values() if isinstance(one, str)]
    kept = {path.name for path in named if path.parent.name == place.name}
    superseded = {name for name in unneeded(store, rules) if name not in kept}
    for name in store.names():
        path = place / name
        if not path.is_symlink() and (everything or name in superseded):
            yield Removable(path=path, why=SUPERSEDED if name in superseded else LAST)


def _is_exported(plan: Plan, finished: dict[str, Finished]) -> bool:
    """Whether the run's model lies on this machine, with all its files."""
    for planned in plan.giving(ExportedModel):
        done = finished.get(planned.slot)
        with contextlib.suppress(PipeError, KeyError, TypeError):
            ExportedModel.restore((done and done.record) or {})
            return True
    return False

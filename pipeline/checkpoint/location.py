"""Places of checkpoints, their stores, and the rules that decide which checkpoints stay.

A run's own place is remembered by its folder in `checkpoints.at`; others a person names.

The first line of that file is the place of the first training's checkpoints; a further training has
a line with its slot and its place, in the order of their first checkpoints.

A run that finds no checkpoint at its place has lost them, and must not start from scratch without
an order to do so.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TypeAlias

from pydantic import BaseModel

from pipeline.checkpoint.manifest import MANIFEST, Manifest
from pipeline.checkpoint.object_store import ObjectStore
from pipeline.checkpoint.store import LocalStore, step_number
from pipeline.contracts.training import TrainingLength
from pipeline.errors import (
    CheckpointError,
    PipeError,
    ResumeRefused,
    UsageError,
    in_words,
    system_errors_as,
)
from pipeline.utils.files import expanded, replace_text
from pipeline.utils.foreign import read_whole
from pipeline.utils.text import near_path

Store: TypeAlias = LocalStore | ObjectStore
DEFAULT = "checkpoints"
"""Folder of a run's checkpoints in its own folder."""
ADDRESS_FILE = "checkpoints.at"
MOST = 1 << 16
"""Most bytes of that file."""
RECIPE = "recipe.yaml"
"""File by which a run's folder is known."""


def address(run_dir: Path, folder: str | None, training: str = "") -> str:
    """Place of a training's checkpoints (empty: the first), given the `folder` of its recipe."""
    own = f"-{training}" if training else ""
    if folder is None:
        return str(run_dir / f"{DEFAULT}{own}")
    if "://" in folder:
        return f"{folder.rstrip('/')}/{run_dir.name}{own}"
    return str(expanded(folder).absolute() / f"{run_dir.name}{own}")


def places(run_dir: Path) -> dict[str, str]:
    """Path or address of the checkpoints of each training of a run that has saved some, by its slot
    (empty: the recipe's first), in the order of their first checkpoints. Inside the run's folder
    they move with it. Raises CheckpointError for a file that names no place."""
    file = run_dir / ADDRESS_FILE
    try:
        content = read_whole(file, most=MOST, within=run_dir) if file.exists() else b""
        first, *others = content.decode("utf-8").split("\n")
    except (OSError, ValueError) as error:
        hint = "write the place of the checkpoints into it"
        raise CheckpointError(f"{file}: damaged: {in_words(error)}", hint=hint) from error
    lines = [("", first), *((slot, place) for slot, _, place in (o.partition(" ") for o in others))]
    own = {slot: address(run_dir, None, slot) for slot, _ in lines}
    return {
        slot: own[slot] if place == Path(own[slot]).name else place
        for slot, place in lines
        if place and (not slot or slot.isidentifier())
    }


def known(run_dir: Path, training: str | None = None) -> str | None:
    """Place of a training's (None: the newest one's) checkpoints; None if there are none."""
    found = places(run_dir)
    return found.get(next(reversed(found), "") if training is None else training)


def remember(run_dir: Path, place: str, training: str = "") -> None:
    """Record that a training saved a checkpoint at `place`. Raises CheckpointError."""
    found = dict[str, str]()
    try:
        found = places(run_dir)
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError):
            raise  # what is garbage is replaced
    if found.get(training) == place:
        return
    lines = {
        slot: Path(at).name if at == address(run_dir, None, slot) else at
        for slot, at in (found | {training: place}).items()
    }
    first, file = lines.pop("", ""), run_dir / ADDRESS_FILE
    try:
        replace_text(file, "\n".join([first, *map(" ".join, lines.items())]))
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error


def require_never_saved(run_dir: Path, address: str, training: str = "") -> None:
    """Raise ResumeRefused if the training saved a checkpoint, as `address` has none."""
    found, file = places(run_dir), run_dir / ADDRESS_FILE
    if training in found:
        over = f"delete the line of `{training}` in {file}" if training else f"delete {file}"
        if not training and len(found) > 1:  # others' lines stay
            over = f"leave the first line of {file} empty"
        raise ResumeRefused(
            f"this run saved checkpoints in {found[training]}, and now there are none in {address}",
            hint="bring them back (is it mounted?), or set the checkpoint slot's folder as it was; "
            f"to start over, {over}",
        )


def open_store(address: str) -> Store:
    """The store at a path, or at an address that fsspec knows (`s3://bucket/folder`)."""
    return ObjectStore(address) if "://" in address else LocalStore(address)


def open_checkpoint(checkpoint: str) -> tuple[Store, str]:
    """The store that holds the checkpoint at an address, and its name there."""
    root, _, name = checkpoint.rstrip("/").rpartition("/")
    return open_store(root or ("/" if checkpoint.startswith("/") else ".")), name


def find(named: str) -> tuple[Store, str]:
    """The store and the checkpoint in it (empty: the newest) that a person means by a checkpoint's
    folder or address, by a folder of checkpoints, or by a run's folder. Raises UsageError."""
    hint = (
        "give the folder of a checkpoint, the folder that holds them, or a run; "
        "pipe convert reads other formats"
    )
    with system_errors_as(UsageError):
        is_local = "://" not in named
        if is_local and not Path(named).is_dir():
            if Path(named).is_file():
                raise UsageError(f"{named} is a file", hint=hint)
            raise UsageError(f"{named} is not there", hint=near_path(named) or hint)
        if is_local and (Path(named) / RECIPE).is_file():
            named = known(Path(named)) or address(Path(named), None)
        store, name = open_checkpoint(named)
        if step_number(name) is not None or store.size(name, MANIFEST) is not None:
            return store, name
        store = open_store(named)
        if not store.names():
            aside = ", ".join(store.quarantined())
            damaged = f"; damaged ones are at {aside}" if aside else ""
            raise UsageError(f"{named} holds no checkpoint{damaged}", hint=hint)
        return store, ""


def earlier(named: str) -> list[str]:
    """Places of the checkpoints of earlier trainings, if a run's folder is named."""
    if "://" in named or not (Path(named) / RECIPE).is_file():
        return []
    return [*places(Path(named)).values()][:-1]


def newest_step(run_dir: Path, training: str | None = None) -> int | None:
    """Step of a training's (None: the newest one's) newest checkpoint on this machine, if any."""
    with contextlib.suppress(PipeError, OSError):
        place = known(run_dir, training)
        if place is not None and "://" not in place:
            names = open_store(place).names()
            return step_number(names[-1]) if names else None
    return None


class Retention(BaseModel):
    """Rules that each keep a checkpoint; without `last`, all are kept."""

    last: int | None = None
    """Number of the newest checkpoints to keep."""
    every: int | None = None
    """Divisor of steps: checkpoints of its multiples are kept forever."""
    best: int = 0
    """Number of checkpoints with the lowest held-out loss to keep."""


def purge(store: Store, retention: Retention) -> list[str]:
    """Delete the checkpoints that need not be kept; call after a commit. Returns warnings about
    checkpoints that cannot be deleted, whatever the reason: the new checkpoint is there all the
    same."""
    warnings = []
    try:
        for name in unneeded(store, retention):
            try:
                store.delete(name)
            except OSError as error:
                reason = error.strerror or error
                warnings.append(f"{store.locate(name)} cannot be deleted: {reason}")
    except Exception as error:
        warnings.append(f"older checkpoints cannot be deleted: {in_words(error)}")
    return warnings


def unneeded(store: Store, retention: Retention) -> Iterator[str]:
    """Yield the names of the checkpoints that need not be kept, oldest first."""
    if retention.last is None:
        return
    names = list(store.names())
    old = names[: -retention.last]
    best = best_of(store, names, retention.best) if retention.best and old else set()
    for name in old:
        step = step_number(name) or 0
        if name not in best and not (retention.every and step % retention.every == 0):
            yield name


def best_of(store: Store, names: Sequence[str], count: int) -> set[str]:
    """The `count` checkpoints with the lowest known held-out loss."""
    losses = []
    for name in names:
        with contextlib.suppress(OSError, CheckpointError):
            loss = heldout_loss(Manifest.load(store.get(name, MANIFEST), name))
            losses += [] if loss is None else [(loss, name)]
    return {name for _, name in sorted(losses)[:count]}


def heldout_loss(manifest: Manifest) -> float | None:
    """The held-out loss of the checkpoint's weights; None where it is not known."""
    metrics = manifest.progress.get("metrics")
    loss = metrics.get("eval_loss") if isinstance(metrics, Mapping) else None
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None


def expected_count(retention: Retention, every: int | str | None, length: TrainingLength) -> int:
    """The largest number of checkpoints at one time, including the one being written, if the
    training saves every `every` steps, as `TrainingLength.in_steps` reads them (None: only at the
    end). If all are kept and the number of steps is unknown, or an epoch's where `every` counts
    epochs, it is 2."""
    asked = [each for each in (every, length.eval_every if retention.best else None) if each]
    found = [length.in_steps(each) for each in asked]
    periods = [Fraction(1) if period is None else period for period in found]
    known = length.steps is not None and None not in found
    # Steps after which one may be saved; if unknown, as many as there may be at one time.
    more = (retention.last or 0) + retention.best + 2
    steps = length.steps if known else math.ceil(more * max([Fraction(1), *periods]))
    assert steps is not None
    numbers = {steps}
    for each_of in periods:
        numbers.update(math.ceil(k * each_of) for k in range(1, math.ceil(steps / each_of)))
    if length.saves_first or (retention.best and length.eval_first):
        numbers.add(0)
    saved = sorted(numbers)
    if retention.last is None:
        return len(saved) if known else min(len(saved), 2)
    older = saved[:-1]
    if not retention.best:  # else evaluated ones, saved or not, may be the newest
        older = older[: -retention.last]
    period = retention.every if known else None
    for_good = sum(step % period == 0 for step in older) if period else 0
    return min(retention.last + for_good + retention.best + 1, len(saved))

"""Places of checkpoints, and their stores: a run's own place, which its folder remembers in
`checkpoints.at`, and those that a person names.

The first line of that file is the place of the first training's checkpoints; a further training has
a line with its slot and its place, in the order of their first checkpoints.

A run that finds no checkpoint at its place has lost them, and must not start from scratch without
an order to do so.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.checkpoint.manifest import MANIFEST
from pipeline.checkpoint.object_store import ObjectStore
from pipeline.checkpoint.store import LocalStore, Store, step_name, step_number
from pipeline.errors import (
    CheckpointError,
    PipeError,
    ResumeRefused,
    UsageError,
    in_words,
    system_errors_as,
)
from pipeline.utils.files import replace_text
from pipeline.utils.foreign import read_whole
from pipeline.utils.text import near_path

if TYPE_CHECKING:
    from pipeline.distributed.process_group import DistContext


DEFAULT = "checkpoints"
"""Folder of a run's checkpoints in its own folder."""
ADDRESS_FILE = "checkpoints.at"
MOST = 1 << 16
"""Most bytes of that file."""
RECIPE = "recipe.yaml"
"""File by which a run's folder is known."""


def _name(training: str) -> str:
    return f"{DEFAULT}-{training}" if training else DEFAULT


def default(run_dir: Path, training: str = "") -> str:
    """Place of a training's checkpoints (empty: the first) if its recipe names none."""
    return str(run_dir / _name(training))


def address(run_dir: Path, folder: str | None, training: str = "") -> str:
    """Place of a training's checkpoints, given the `folder` of its recipe."""
    if folder is None:
        return default(run_dir, training)
    name = f"{run_dir.name}-{training}" if training else run_dir.name
    if "://" in folder:
        return f"{folder.rstrip('/')}/{name}"
    return str(Path(folder).expanduser().absolute() / name)


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
    return {
        slot: default(run_dir, slot) if place == _name(slot) else place
        for slot, place in lines
        if place and (not slot or slot.isidentifier())
    }


def known(run_dir: Path, training: str | None = None) -> str | None:
    """Place of a training's (None: the newest one's) checkpoints; None if there are none."""
    found = places(run_dir)
    return found.get(next(reversed(found), "") if training is None else training)


def remember(run_dir: Path, address: str, training: str = "") -> None:
    """Record that a training saved a checkpoint at `address`. Raises CheckpointError."""
    found = dict[str, str]()
    try:
        found = places(run_dir)
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError):
            raise  # what is garbage is replaced
    if found.get(training) == address:
        return
    lines = {
        slot: _name(slot) if place == default(run_dir, slot) else place
        for slot, place in (found | {training: address}).items()
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


def require_shared(store: Store, dist: DistContext, identity: str) -> None:
    """Raise CheckpointError on all ranks unless all see what rank 0 writes (collective)."""
    with system_errors_as(CheckpointError):
        trial = store.begin(step_name(0), identity)
        if dist.is_main:
            trial.put("seen", b"")
    dist.barrier()
    with system_errors_as(CheckpointError):
        sees = trial.get("seen") is not None
    seen = dist.gather(sees)
    store.abandon(trial)
    if not all(seen):
        raise CheckpointError(
            f"rank {seen.index(False)} does not see what rank 0 writes to {store.locate('')}",
            hint="checkpoints must be on a file system that all nodes share",
        )


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
            named = known(Path(named)) or default(Path(named))
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


def agreed_start(start_from: str, dist: DistContext) -> str:
    """Address that `start_from` means, as rank 0 finds it. Raises CheckpointError."""
    found = None
    if dist.is_main:
        try:
            store, name = find(start_from)
            found = store.locate(name or store.names()[-1])
        except (UsageError, OSError) as error:
            raise CheckpointError(f"start_from: {in_words(error)}") from error
    return dist.broadcast_str(found)

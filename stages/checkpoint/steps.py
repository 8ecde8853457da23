"""Checkpoints as one folder a step: when to save, how it becomes visible, how many to keep.

What is inside a folder is the format's own; this file writes progress and random state beside it.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.artifacts import Checkpoints, Progress
from pipeline.errors import CheckpointError
from pipeline.files import sync, sync_tree
from pipeline.length import Length
from pipeline.stage import Context, Room
from pipeline.state import randomness, whereabouts
from pipeline.state.count import count, room
from pipeline.state.retention import Retention
from pipeline.state.store import step_name, step_number
from pipeline.state.visibility import HINT

PROGRESS = "progress.json"


def step_folders(root: Path) -> list[Path]:
    """Committed checkpoints under `root`, oldest first."""
    found = root.iterdir() if root.is_dir() else ()
    return sorted(path for path in found if step_number(path.name) is not None)


class StepCheckpoints(Checkpoints):
    """Saves to `checkpoints/step-NNNNNNNN.partial` and renames it when every rank has written.

    A folder with the final name is therefore complete. `every` and `keep` count steps and
    checkpoints; None means only at the end, and all.
    """

    format: str

    def __init__(self, ctx: Context, *, every: int | None, keep: int | None) -> None:
        self._ctx = ctx
        self._every = every
        self._keep = keep
        self._root = Path(whereabouts.default(ctx.run_dir))
        self._newest: Path | None = None

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write the engine's state into `folder` (collective; the folder exists)."""

    @abstractmethod
    def read(self, folder: Path) -> None:
        """Load the engine's state from `folder` (collective)."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes of a checkpoint, at most."""

    def room(self, length: Length) -> Iterator[Room]:
        """Disk for as many as there will be at once, less those that are there."""
        number = count(Retention(last=self._keep), self._every, length).number
        yield room(number, len(step_folders(self._root)), self.size, self._root)

    def due(self, progress: Progress) -> bool:
        return self._every is not None and progress.step > 0 and progress.step % self._every == 0

    def save(self, progress: Progress) -> None:
        dist = self._ctx.dist
        final = self._root / step_name(progress.step)
        if final == self._newest:
            if dist.is_main:
                self._amend(final, progress)
            return
        partial = final.with_name(final.name + ".partial")
        with dist.main_first() as main:
            if main:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        self.write(partial)
        states = randomness.capture(dist.device)
        coded = {name: base64.b64encode(state).decode() for name, state in states.items()}
        write_json(partial / f"random-{dist.rank:05d}.json", coded)
        dist.barrier()
        if dist.local_rank == 0:  # of every machine: what its processes wrote is in its memory
            sync_tree(partial)
        dist.barrier()
        if dist.is_main:
            record = {
                "format": self.format,
                "world_size": dist.world_size,
                "progress": vars(progress),
            }
            write_json(partial / PROGRESS, record)
            sync(partial)
            partial.replace(final)
            sync(self._root)
            whereabouts.remember(self._ctx.run_dir, str(self._root))
            self._forget_old()
        dist.barrier()
        self._newest = final
        self._ctx.log.info("saved %s", final)

    def _amend(self, folder: Path, progress: Progress) -> None:
        """Let a checkpoint have what is known by now of the state that it holds."""
        record = read_json(folder / PROGRESS)
        if progress.differs_from(record["progress"]):
            partial = folder / f"{PROGRESS}.partial"
            write_json(partial, {**record, "progress": vars(progress)})
            partial.replace(folder / PROGRESS)
            sync(folder)

    def finish(self) -> str:
        if self._newest is None:
            raise CheckpointError("nothing was saved")
        return str(self._newest)

    def restore(self, admit: Callable[[Progress], None]) -> Progress | None:
        if self._ctx.dist.is_main:
            self._clean()
        newest = self._agreed_newest()
        if newest is None:
            whereabouts.require_none(self._ctx.run_dir, str(self._root))
            return None
        record = read_json(newest / PROGRESS)
        self._refuse_strangers(newest, record)
        try:
            progress = Progress(**record["progress"])
        except TypeError as error:
            raise CheckpointError(f"{newest}: written by another version: {error}") from error
        admit(progress)
        self.read(newest)
        dist = self._ctx.dist
        coded = read_json(newest / f"random-{dist.rank:05d}.json")
        states = {name: base64.b64decode(text) for name, text in coded.items()}
        randomness.apply(states, dist.device)
        self._ctx.log.info("restored %s", newest)
        self._newest = newest
        return progress

    def _clean(self) -> None:
        """Remove what killed saves and deletions left."""
        for folder in self._root.glob("step-*.partial"):
            shutil.rmtree(folder, ignore_errors=True)

    def _agreed_newest(self) -> Path | None:
        """Rank 0's choice, on every rank."""
        dist = self._ctx.dist
        names = [folder.name for folder in step_folders(self._root)]
        name = dist.share("".join(names[-1:]) if dist.is_main else None)
        if name and name not in names:
            raise CheckpointError(
                f"rank {dist.rank} does not see what rank 0 sees: {self._root / name}", hint=HINT
            )
        return self._root / name if name else None

    def _refuse_strangers(self, folder: Path, record: Mapping[str, Any]) -> None:
        if record["format"] != self.format:
            raise CheckpointError(
                f"{folder}: written in format {record['format']}, this recipe reads {self.format}"
            )
        if record["world_size"] != self._ctx.dist.world_size:
            raise CheckpointError(
                f"{folder}: written by {record['world_size']} processes, "
                f"this run has {self._ctx.dist.world_size}",
                hint=f"resume with launch.procs={record['world_size']}",
            )

    def _forget_old(self) -> None:
        if self._keep is not None:
            for folder in step_folders(self._root)[: -self._keep]:
                # Under another name first: a crash in between must not leave half a checkpoint.
                doomed = folder.rename(folder.with_name(folder.name + ".partial"))
                shutil.rmtree(doomed)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` and force it to disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises CheckpointError when it is missing or damaged."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value

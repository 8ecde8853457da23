"""The canonical checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.checkpoint import Reading, StateFormat

if TYPE_CHECKING:
    from pipeline.checkpoint import StateSource


class Canonical(StateFormat):
    """A manifest and a file of parts of tensors for each rank that wrote; every byte checksummed.

    Written by one process it has one such file, and any number of ranks resumes from it.
    """

    name = "canonical"

    def detect(self, folder: Path) -> bool:
        return (folder / "manifest.json").is_file() and not _is_full(folder)

    def open(self, folder: Path, reading: Reading) -> StateSource:
        return open_checkpoint(folder)

    def target(self, folder: Path, step: int) -> Path:
        from pipeline.checkpoint import step_target

        return step_target(folder, step)

    def write(self, source: StateSource, folder: Path) -> Sequence[str]:
        from pipeline.checkpoint import SHARDED, LocalStore, write_checkpoint

        write_checkpoint(source, LocalStore(folder.parent), folder.name, SHARDED)
        return ()


class Full(Canonical):
    """One file of weights that other tools load, one of optimizer state, with the canonical
    checkpoint's manifest and checksums."""

    name = "full"

    def detect(self, folder: Path) -> bool:
        return (folder / "manifest.json").is_file() and _is_full(folder)

    def write(self, source: StateSource, folder: Path) -> Sequence[str]:
        from pipeline.checkpoint import FULL, LocalStore, write_checkpoint

        write_checkpoint(source, LocalStore(folder.parent), folder.name, FULL)
        return ()


def open_checkpoint(folder: Path) -> StateSource:
    """A checkpoint in either layout; only the names of its files differ."""
    from pipeline.checkpoint import CheckpointReader, LocalStore

    folder = folder.resolve()
    reader = CheckpointReader(LocalStore(folder.parent), folder.name)
    reader.require_files()
    return reader


def _is_full(folder: Path) -> bool:
    return (folder / "model.safetensors").is_file()

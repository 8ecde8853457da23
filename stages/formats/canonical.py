"""The canonical checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.checkpoint import Reading, StateFormat, StateSource


class Canonical(StateFormat):
    """A manifest and, for each rank that wrote, a file of parts of tensors; every byte checksummed.
    Any number of ranks resumes from it. Written by one process it has one such file."""

    name = "canonical"
    full = False
    """Whether the layout is that of `Full`."""

    def detect(self, folder: Path) -> bool:
        is_full = (folder / "model.safetensors").is_file()
        return (folder / "manifest.json").is_file() and is_full == self.full

    def open(self, folder: Path, reading: Reading) -> StateSource:
        from pipeline.checkpoint import CheckpointReader, LocalStore

        folder = folder.resolve()
        reader = CheckpointReader(LocalStore(folder.parent), folder.name)
        reader.require_files()
        return reader

    def target(self, folder: Path, step: int) -> Path:
        from pipeline.checkpoint import step_target

        return step_target(folder, step)

    def write(self, source: StateSource, folder: Path) -> Sequence[str]:
        from pipeline.checkpoint import FULL, SHARDED, LocalStore, write_checkpoint

        layout = FULL if self.full else SHARDED
        write_checkpoint(source, LocalStore(folder.parent), folder.name, layout)
        return ()


class Full(Canonical):
    """Weights in a file that other tools load, optimizer state in another, and a manifest."""

    name = "full"
    full = True

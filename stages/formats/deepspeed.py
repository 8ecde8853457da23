"""DeepSpeed's checkpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pipeline import CheckpointError
from pipeline.checkpoint import Reading, StateFormat, StateSource
from pipeline.utils import read_whole

POINTERS = ("latest", "latest_universal")
"""Files that name the sub-folder of the newest state."""


class DeepSpeed(StateFormat):
    """Checkpoints of `DeepSpeedEngine.save_checkpoint` under ZeRO-1, 2 and 3, with or without the
    whole optimizer state in host memory, and DeepSpeed's universal checkpoints; these alone are
    written.

    A universal checkpoint is loaded on any number of ranks with `checkpoint: {load_universal:
    true}` in DeepSpeed's configuration. `write` returns the limits that DeepSpeed 0.19 has there.
    """

    name = "deepspeed"

    def detect(self, folder: Path) -> bool:
        pointed = any((folder / name).is_file() for name in POINTERS)
        return pointed or any(folder.glob("*_model_states.pt"))

    def open(self, folder: Path, reading: Reading) -> StateSource:
        from stages.formats.deepspeed_native import open_native
        from stages.formats.deepspeed_universal import open_universal
        from stages.formats.stored import understood

        state = _state_folder(folder)
        with understood(state, "DeepSpeed"):
            if (state / "zero").is_dir():
                return open_universal(state, reading)
            return open_native(folder, state, reading)

    def write(self, source: StateSource, folder: Path) -> Sequence[str]:
        from stages.formats.deepspeed_universal import write_universal
        from stages.formats.stored import understood

        with understood(source.where, "pipe"):
            return write_universal(source, folder)


def _state_folder(folder: Path) -> Path:
    """The sub-folder that a pointer names, or the folder itself if there is no pointer."""
    for pointer in (folder / name for name in POINTERS):
        if pointer.is_file():
            tag = read_whole(pointer, most=1000).decode("utf-8", "replace").strip()
            named = re.fullmatch(r"(?!\.)[\w.-]{1,200}", tag, re.ASCII)
            if not named or not (folder / tag).is_dir():
                raise CheckpointError(f"{pointer}: names no folder next to it: {tag[:100]!r}")
            return folder / tag
    return folder

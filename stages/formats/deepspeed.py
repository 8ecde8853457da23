"""DeepSpeed's checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.checkpoint.formats import Reading, StateFormat

if TYPE_CHECKING:
    from pipeline.checkpoint.formats import StateSource


class DeepSpeed(StateFormat):
    """What `DeepSpeedEngine.save_checkpoint` writes under ZeRO-1, 2 and 3, with any offload of the
    whole optimizer state, is read; so is DeepSpeed's universal checkpoint, and that is what is
    written.

    A universal checkpoint is loaded on any number of ranks with `checkpoint: {load_universal:
    true}` in DeepSpeed's configuration. What DeepSpeed 0.19 makes of it falls short in some points,
    which `write` tells.
    """

    name = "deepspeed"

    def detect(self, folder: Path) -> bool:
        pointed = any((folder / name).is_file() for name in ("latest", "latest_universal"))
        return pointed or any(folder.glob("*_model_states.pt"))

    def open(self, folder: Path, reading: Reading) -> StateSource:
        from stages.formats.deepspeed_files import state_folder
        from stages.formats.deepspeed_native import open_native
        from stages.formats.deepspeed_universal import open_universal
        from stages.formats.files import understood

        state = state_folder(folder)
        with understood(state, "DeepSpeed"):
            if (state / "zero").is_dir():
                return open_universal(state, reading)
            return open_native(folder, state, reading)

    def write(self, source: StateSource, folder: Path) -> Sequence[str]:
        from stages.formats.deepspeed_writer import write_universal
        from stages.formats.files import understood

        with understood(source.where, "pipe"):
            return write_universal(source, folder)

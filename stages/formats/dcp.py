"""Folders of torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.checkpoint import Reading, StateFormat, StateSource

MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
"""Folders of accelerate's and the Trainer's sharded state."""


class Dcp(StateFormat):
    """Model and optimizer as torch.distributed.checkpoint saves what `get_model_state_dict` and
    `get_optimizer_state_dict` return, flattened (torchtitan) or not (accelerate, Trainer).

    `.metadata` is a pickle, of which only the classes that describe tensors are admitted. A tied
    weight is stored under each of its names; equal copies become one tensor again. A parameter
    without optimizer state counts as frozen.
    """

    name = "dcp"

    def detect(self, folder: Path) -> bool:
        return (folder / ".metadata").is_file() or (folder / MODEL / ".metadata").is_file()

    def open(self, folder: Path, reading: Reading) -> StateSource:
        from stages.formats.dcp_state import open_dcp
        from stages.formats.stored import understood

        parts = [folder / MODEL, folder / OPTIMIZER] if (folder / MODEL).is_dir() else [folder]
        with understood(folder, "torch.distributed.checkpoint"):
            return open_dcp(folder, [part for part in parts if part.is_dir()], reading)

    def write(self, source: StateSource, folder: Path) -> Sequence[str]:
        from stages.formats.dcp_state import write_dcp
        from stages.formats.stored import understood

        with understood(source.where, "pipe"):
            return write_dcp(source, folder)

"""Checkpoints of transformers' Trainer."""

from __future__ import annotations

from pathlib import Path

from pipeline.checkpoint import Reading, StateFormat, StateSource

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
STATE = "trainer_state.json"


class Trainer(StateFormat):
    """`checkpoint-N` of transformers' Trainer with AdamW, on one process or under DDP: weights from
    safetensors, moments from `optimizer.pt`. Read only.

    `optimizer.pt` numbers parameters instead of naming them. The names follow from the model that
    `config.json` describes and from the Trainer's two groups (with and without decay); where shapes
    leave a choice, the checkpoint is refused. `training_args.bin` is never opened.
    """

    name = "trainer"
    writes = False

    def detect(self, folder: Path) -> bool:
        weights = any((folder / name).is_file() for name in WEIGHTS)
        return weights and (folder / STATE).is_file() and not (folder / "latest").exists()

    def open(self, folder: Path, reading: Reading) -> StateSource:
        from stages.hf.checkpoint_source import open_trainer

        return open_trainer(folder, folder / STATE, reading)

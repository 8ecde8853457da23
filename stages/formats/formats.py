"""Formats of training states: canonical, torch.distributed.checkpoint and DeepSpeed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pipeline import CheckpointError
from pipeline.checkpoint import Reading, StateFormat, StateSource
from pipeline.utils import read_whole


class Canonical(StateFormat):
    """A manifest and, for each rank that wrote, a file of parts of tensors; every byte checksummed.
    Any number of ranks resumes from it. Written by one process it has one such file."""

    name = "canonical"
    full = False
    """Whether the layout is the one of `Full`."""

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


FOLDERS = ("pytorch_model_fsdp_0", "optimizer_0")
"""Of accelerate's and the Trainer's sharded state: the model's, and the optimizer's."""


class Dcp(StateFormat):
    """Model and optimizer as torch.distributed.checkpoint saves what `get_model_state_dict` and
    `get_optimizer_state_dict` return, flattened (torchtitan) or not (accelerate, Trainer).

    `.metadata` is a pickle; only the classes that describe tensors are admitted. A tied weight is
    stored under each of its names; equal copies become one tensor again. A parameter without
    optimizer state counts as frozen."""

    name = "dcp"

    def detect(self, folder: Path) -> bool:
        return any((folder / name / ".metadata").is_file() for name in ("", FOLDERS[0]))

    def open(self, folder: Path, reading: Reading) -> StateSource:
        from stages.formats import dcp_compat, stored

        nested = (folder / FOLDERS[0]).is_dir()
        parts = [folder / name for name in FOLDERS] if nested else [folder]
        with stored.understood(folder, "torch.distributed.checkpoint"):
            return dcp_compat.open_dcp(folder, [part for part in parts if part.is_dir()], reading)

    def write(self, source: StateSource, folder: Path) -> Sequence[str]:
        from stages.formats import dcp_compat, stored

        with stored.understood(source.where, "pipe"):
            return dcp_compat.write_dcp(source, folder)


POINTERS = ("latest", "latest_universal")
"""Files that name the sub-folder of the newest state."""


class DeepSpeed(StateFormat):
    """Checkpoints of `DeepSpeedEngine.save_checkpoint` under ZeRO-1, 2 and 3, with or without the
    whole optimizer state in host memory, and DeepSpeed's universal checkpoints; only these are
    written.

    A universal checkpoint is loaded on any number of ranks with `checkpoint: {load_universal:
    true}` in DeepSpeed's configuration. `write` returns the limits that DeepSpeed 0.19 has there.
    """

    name = "deepspeed"

    def detect(self, folder: Path) -> bool:
        pointed = any((folder / name).is_file() for name in POINTERS)
        return pointed or any(folder.glob("*_model_states.pt"))

    def open(self, folder: Path, reading: Reading) -> StateSource:
        from stages.formats import deepspeed_native, deepspeed_universal, stored

        pointer = next((folder / name for name in POINTERS if (folder / name).is_file()), None)
        state = folder
        if pointer is not None:
            tag = read_whole(pointer, most=1000).decode("utf-8", "replace").strip()
            named = re.fullmatch(r"(?!\.)[\w.-]{1,200}", tag, re.ASCII)
            if not named or not (folder / tag).is_dir():
                raise CheckpointError(f"{pointer}: names no folder next to it: {tag[:100]!r}")
            state = folder / tag
        with stored.understood(state, "DeepSpeed"):
            if (state / "zero").is_dir():
                return deepspeed_universal.open_universal(state, reading)
            return deepspeed_native.open_native(folder, state, reading)

    def write(self, source: StateSource, folder: Path) -> Sequence[str]:
        from stages.formats import deepspeed_universal, stored

        with stored.understood(source.where, "pipe"):
            return deepspeed_universal.write_universal(source, folder)

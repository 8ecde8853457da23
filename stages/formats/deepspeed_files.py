"""The files of a DeepSpeed checkpoint, read without DeepSpeed and without running anything."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoint.layout import random_key
from pipeline.contracts.training import Progress
from pipeline.errors import CheckpointError
from stages.formats import files
from stages.formats.files import PROGRESS, read_json
from stages.formats.mapped import Stored, whole

_TAG = re.compile(r"(?!\.)[\w.-]{1,200}", re.ASCII)
_MODEL = re.compile(
    r"(?:(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt"
)
_OPTIMIZER = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"
)


class _Inert:
    """Stands in for a class of DeepSpeed's: keeps what was saved of an object, and does nothing."""


class Scaler(_Inert):
    """A loss scaler; its attributes are those of DeepSpeed's."""

    cur_scale: float
    dynamic: bool
    cur_iter: int
    last_overflow_iter: int
    scale_window: int


class Fragment(_Inert):
    """Elements [start, start + numel) of a rank's flat tensor."""

    numel: int
    start: int


class Stage(int):
    """Number of the ZeRO stage."""


ADMITTED = [
    (Scaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Scaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (Fragment, "deepspeed.utils.tensor_fragment.fragment_address"),
    (Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


def load(file: Path, *, verify: bool = True) -> Mapping[str, Any]:
    """One of DeepSpeed's files. Raises CheckpointError."""
    state = files.load(file, ADMITTED, verify=verify)
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{file}: is not one of DeepSpeed's files")
    return state


def state_folder(folder: Path) -> Path:
    """Where the state is: in the sub-folder that `latest` names, or here."""
    for name in ("latest", "latest_universal"):
        pointer = folder / name
        if pointer.is_file():
            with pointer.open("rb") as file:
                tag = file.read(1000).decode("utf-8", "replace").strip()
            if not _TAG.fullmatch(tag) or not (folder / tag).is_dir():
                raise CheckpointError(f"{pointer}: names no folder beside it: {tag[:100]!r}")
            return folder / tag
    return folder


def model_files(folder: Path) -> list[Path]:
    """Files of the model, in rank order. Raises CheckpointError for parallelism other than ZeRO."""
    return _in_rank_order(folder, "*_model_states.pt", _MODEL)


def optimizer_files(folder: Path) -> list[Path]:
    """Files of the optimizer, in rank order."""
    return _in_rank_order(folder, "*_optim_states.pt", _OPTIMIZER)


def _in_rank_order(folder: Path, pattern: str, name: re.Pattern[str]) -> list[Path]:
    ranks: dict[int, Path] = {}
    for file in folder.glob(pattern):
        match = name.fullmatch(file.name)
        if match is None or int(match["mp"]):
            raise CheckpointError(
                f"{file}: is of tensor, pipeline or expert parallelism, which is not converted"
            )
        rank = int(match["dp"] or 0)
        if rank in ranks:
            raise CheckpointError(f"{folder}: both {ranks[rank].name} and {file.name} are there")
        ranks[rank] = file
    if sorted(ranks) != list(range(len(ranks))):
        missing = min(set(range(len(ranks))) - set(ranks))
        raise CheckpointError(f"{folder}: the file of rank {missing} ({pattern}) is missing")
    return [ranks[rank] for rank in range(len(ranks))]


def own_progress(folder: Path) -> dict[str, Any] | None:
    """The progress of a training of ours; None for a checkpoint of another tool."""
    if not (folder / PROGRESS).is_file():
        return None
    record = read_json(folder / PROGRESS)
    try:
        return vars(Progress.from_record(record["progress"]))
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / PROGRESS}: of another version: {error}") from error


def own_random(folder: Path) -> dict[str, Stored]:
    """The states of every rank's generators, by key."""
    found = {}
    for file in folder.glob("random-*.json"):
        rank = int(file.stem.removeprefix("random-"))
        for name, text in read_json(file).items():
            data = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
            found[random_key(rank, name)] = whole(data)
    return found

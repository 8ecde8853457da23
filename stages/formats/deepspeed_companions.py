"""Progress and random streams, which pipetrain put beside DeepSpeed's files when it saved them."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import torch

from pipeline.artifacts import Progress
from pipeline.errors import CheckpointError
from pipeline.state.planning import random_key
from stages.formats.mapped import Stored, whole
from stages.formats.records import PROGRESS, read_json


def own_progress(folder: Path) -> dict[str, Any] | None:
    """The progress of a training of ours; None for a checkpoint of another tool."""
    if not (folder / PROGRESS).is_file():
        return None
    record = read_json(folder / PROGRESS)
    try:
        return vars(Progress(**record["progress"]))
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

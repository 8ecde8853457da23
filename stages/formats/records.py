"""JSON files beside a checkpoint's tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError

PROGRESS = "progress.json"
"""The progress of a training of ours, in a checkpoint of a foreign format; written last."""


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

"""The weight files of a folder in Hugging Face layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.errors import StageError
from stages.model.paths import is_plain

SAFETENSORS_INDEX = "model.safetensors.index.json"
BIN_INDEX = "pytorch_model.bin.index.json"


def safetensors_files(folder: Path) -> list[Path]:
    """The safetensors files of the folder, in order; empty when it has none."""
    return _files(folder, SAFETENSORS_INDEX, "model.safetensors")


def bin_files(folder: Path) -> list[Path]:
    """The torch files of the folder, in order; empty when it has none."""
    return _files(folder, BIN_INDEX, "pytorch_model.bin")


def weight_files(folder: Path, gguf: str | None) -> list[Path]:
    """The files that the weights are read from. Raises StageError when there are none."""
    files = [folder / gguf] if gguf else safetensors_files(folder) or bin_files(folder)
    if not files:
        raise StageError(
            f"no weights in {folder}",
            hint="expected model.safetensors, model.safetensors.index.json or pytorch_model.bin",
        )
    for file in files:
        if not file.is_file():
            raise StageError(f"a weight file is missing: {file}")
    return files


def _files(folder: Path, index: str, single: str) -> list[Path]:
    if (folder / single).is_file():
        return [folder / single]
    if not (folder / index).is_file():
        return []
    names = sorted(set(_weight_map(folder / index).values()))
    for name in names:
        # An index is data from outside: it must not make us read elsewhere.
        if not is_plain(name):
            raise StageError(f"{folder / index} points outside its folder: {name!r}")
    return [folder / name for name in names]


def _weight_map(index: Path) -> dict[str, str]:
    try:
        content: Any = json.loads(index.read_text("utf-8"))
        weight_map = content["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise StageError(f"{index} is damaged: {error!r}") from error
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise StageError(f"{index} is damaged: weight_map is not a mapping of names to files")
    return weight_map

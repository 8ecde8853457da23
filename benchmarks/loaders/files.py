"""A model folder with random bf16 weights in several files, as a hub has it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import values
from safetensors.torch import save_file
from shapes import Shape, count, parameters, split

INDEX = "model.safetensors.index.json"
DONE = "complete.json"
"""Holds the config, once everything is there."""


def make(folder: Path, config: Mapping[str, Any], parts: int = 4) -> list[Path]:
    """Weight files of about equal size, unless they are there already."""
    if not _is_there(folder, config):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _write(folder, config, parts)
        (folder / DONE).write_text(json.dumps(config), "utf-8")
    return sorted(folder.glob("*.safetensors"))


def _is_there(folder: Path, config: Mapping[str, Any]) -> bool:
    done = folder / DONE
    return done.is_file() and json.loads(done.read_text("utf-8")) == dict(config)


def _write(folder: Path, config: Mapping[str, Any], parts: int) -> None:
    tensors = parameters(config)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(split(tensors, parts), start=1):
        file = f"model-{number:05}-of-{parts:05}.safetensors"
        save_file({n: _random(n, tensors[n]) for n in names}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": 2 * count(tensors)}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", "utf-8")
    declared = {**config, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(declared, indent=1) + "\n", "utf-8")


def _random(name: str, shape: Shape) -> torch.Tensor:
    tensor = torch.empty(math.prod(shape), dtype=torch.bfloat16)
    done = 0
    for part in values.floats(name, 0, tensor.numel()):
        tensor[done : done + len(part)] = torch.from_numpy(part)
        done += len(part)
    return tensor.view(shape)

"""The tensors of a saved adapter, to go on from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipeline.artifacts import TensorReader
from pipeline.errors import StageError
from stages.adapter.files import PREFIX, WEIGHTS, name_in_file
from stages.adapter.injection import Layer
from stages.adapter.rows import read_rows, row_blocks
from stages.model.names import listed
from stages.weights.change import renamed
from stages.weights.converted import ConvertedReader
from stages.weights.safetensors import SafetensorsReader

if TYPE_CHECKING:
    from torch import nn


def saved_updates(
    folder: Path,
    model: nn.Module,
    trained: Sequence[str],
    layers: Sequence[Layer],
    base: TensorReader,
) -> TensorReader:
    """The tensors of `model` that are `trained`, as `folder` holds them, under the model's names.

    peft saves the weight of a head beside its update: it has to be that of `base`. Raises
    StageError when the adapter is of another model or of other settings.
    """
    reader = SafetensorsReader([folder / WEIGHTS])
    stored = {name_in_file(name): name for name in reader.names()}
    wanted = {name_in_file(name): name for name in trained}
    own = {PREFIX + layer.weight: layer.weight for layer in layers}
    missing, extra = wanted.keys() - stored.keys(), stored.keys() - wanted.keys()
    if missing or extra - own.keys():
        parts = [f"missing {listed(missing)}"] * bool(missing)
        parts += [f"unexpected {listed(extra)}"] * bool(extra)
        raise StageError(
            f"the adapter in {folder} is not of this model and these settings: " + "; ".join(parts),
            hint="targets, dora and train_also must be those that it was trained with",
        )
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    for file, name in wanted.items():
        found = reader.spec(stored[file]).shape
        if found != shapes[name]:
            raise StageError(
                f"the adapter in {folder} is not of this model and these settings: {name} has "
                f"shape {list(found)} instead of {list(shapes[name])}"
            )
    for file in extra:
        if not _same(reader, stored[file], base, own[file]):
            raise StageError(
                f"the adapter in {folder} brings its own {stored[file].removeprefix(PREFIX)}, "
                "which is not this model's: it was trained on another one"
            )
    return ConvertedReader(reader, [renamed(stored[file], name) for file, name in wanted.items()])


def _same(reader: TensorReader, name: str, base: TensorReader, own: str) -> bool:
    """Whether two matrices are equal in the dtype of the first."""
    spec = reader.spec(name)
    if spec.shape != base.spec(own).shape:
        return False
    rows, columns = spec.shape
    return all(
        torch.equal(
            read_rows(reader, name, top, bottom, columns),
            read_rows(base, own, top, bottom, columns).to(spec.dtype).float(),
        )
        for top, bottom in row_blocks(rows, columns, 0, rows * columns)
    )

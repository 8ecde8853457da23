"""The values that an adapter begins with: fresh ones, or those of a saved adapter."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from pipeline import StageError, TensorReader, TensorSpec
from stages.adapter.compat import PREFIX, WEIGHTS, name_in_file
from stages.adapter.injection import Layer
from stages.adapter.merging import read_rows, row_blocks
from stages.model.declared import listed
from stages.model.random_reader import unit_seed
from stages.weights.change import renamed
from stages.weights.converted import ConvertedReader
from stages.weights.safetensors import SafetensorsReader
from stages.weights.torch_files import pieces


class InitialValues(TensorReader):
    """A fresh adapter, which leaves the model as it is: A is uniform in [-b, b] with b = 1 /
    sqrt(inputs), a pure function of the seed and its name (peft's rule, which is torch's for linear
    layers: He et al. 2015, with a slope of sqrt(5)); B is zero; DoRA's magnitudes are the lengths
    of the rows of the weights that `open_base` reads."""

    as_stored = True
    """Quick to make, as updates are small."""

    def __init__(
        self, layers: Sequence[Layer], open_base: Callable[[], TensorReader], *, seed: int
    ) -> None:
        self._open_base = open_base
        self._base: TensorReader | None = None
        self._seed = seed
        self._layers = {name: layer for layer in layers for name in layer.shapes}

    def names(self) -> Collection[str]:
        return self._layers.keys()

    def spec(self, name: str) -> TensorSpec:
        if name not in self._layers:
            raise StageError(f"no tensor named {name}")
        return TensorSpec(self._layers[name].shapes[name], torch.float32)

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        layer, spec = self._layers[name], self.spec(name)
        if name == layer.magnitude:
            yield from self._lengths(layer, start, stop)
        elif name == layer.up:
            yield from pieces(torch.zeros(spec.numel), start, stop)
        else:
            generator = torch.Generator().manual_seed(unit_seed(self._seed, name))
            bound = 1 / math.sqrt(layer.inputs)
            values = torch.empty(spec.numel).uniform_(-bound, bound, generator=generator)
            yield from pieces(values, start, stop)

    def _lengths(self, layer: Layer, start: int, stop: int) -> Iterator[Tensor]:
        if self._base is None:
            self._base = self._open_base()
        width = layer.inputs
        for top, bottom in row_blocks(layer.outputs, width, start * width, stop * width):
            rows = read_rows(self._base, layer.weight, top, bottom, width)
            lengths = torch.linalg.vector_norm(rows, dim=1)
            yield lengths[max(start - top, 0) : stop - top]

    def close(self) -> None:
        if self._base is not None:
            self._base.close()
            self._base = None


def saved_updates(
    folder: Path, model: nn.Module, trained: Sequence[str], layers: Sequence[Layer]
) -> TensorReader:
    """The `trained` tensors of `model` from the adapter in `folder`, under the model's names.

    The weight of a head, which peft saves beside its update, is not read. Raises StageError when
    the adapter is of another model or of other settings.
    """
    reader = SafetensorsReader([folder / WEIGHTS])
    stored = {name_in_file(name): name for name in reader.names()}
    wanted = {name_in_file(name): name for name in trained}
    missing = wanted.keys() - stored.keys()
    extra = stored.keys() - wanted.keys() - {PREFIX + layer.weight for layer in layers}
    refusal = f"the adapter in {folder} is not of this model and these settings"
    if missing or extra:
        parts = [f"missing {listed(missing)}"] * bool(missing)
        parts += [f"unexpected {listed(extra)}"] * bool(extra)
        raise StageError(
            f"{refusal}: {'; '.join(parts)}",
            hint="targets, dora and train_also must be those that it was trained with",
        )
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    for file, name in wanted.items():
        found = reader.spec(stored[file]).shape
        if found != shapes[name]:
            raise StageError(
                f"{refusal}: {name} has shape {list(found)} instead of {list(shapes[name])}"
            )
    return ConvertedReader(reader, [renamed(stored[file], name) for file, name in wanted.items()])

"""The values that updates begin with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from pipeline.artifacts import TensorReader, TensorSpec
from pipeline.errors import StageError
from stages.adapter.injection import Layer, bound
from stages.adapter.rows import read_rows, row_blocks
from stages.model.random_reader import unit_seed
from stages.weights.memory import pieces

if TYPE_CHECKING:
    from torch import Tensor


class FreshUpdates(TensorReader):
    """A is a pure function of the seed and its name, B is zero, DoRA's magnitudes are the lengths
    of the rows of the weights that `open_base` reads: the model begins as it is."""

    as_stored = True
    """Quick to make, as updates are small."""

    def __init__(
        self, layers: Sequence[Layer], open_base: Callable[[], TensorReader], *, seed: int
    ) -> None:
        self._open_base = open_base
        self._base: TensorReader | None = None
        self._seed = seed
        self._layers: dict[str, Layer] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for layer in layers:
            shapes: dict[str, tuple[int, ...]] = {
                layer.down: (layer.rank, layer.inputs),
                layer.up: (layer.outputs, layer.rank),
            }
            if layer.dora:
                shapes[layer.magnitude] = (layer.outputs,)
            self._shapes |= shapes
            self._layers |= dict.fromkeys(shapes, layer)

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def spec(self, name: str) -> TensorSpec:
        if name not in self._shapes:
            raise StageError(f"no tensor named {name}")
        return TensorSpec(self._shapes[name], torch.float32)

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        layer, spec = self._layers[name], self.spec(name)
        if name == layer.magnitude:
            yield from self._lengths(layer, start, stop)
        elif name == layer.up:
            yield from pieces(torch.zeros(spec.numel), start, stop)
        else:
            generator = torch.Generator().manual_seed(unit_seed(self._seed, name))
            values = torch.empty(spec.numel)
            values.uniform_(-bound(layer), bound(layer), generator=generator)
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

"""Values of an adapter: those that it begins with, and the model's weights with it merged into
them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from pipeline import TensorReader, TensorSpec, Weights
from pipeline.checkpoint import CHUNK
from stages.adapter.layers import Layer
from stages.model.random_reader import unit_seed
from stages.weights.change import renamed
from stages.weights.converted import ConvertedReader
from stages.weights.torch_files import named, pieces
from stages.weights.views import ComputedReader, JoinedReader


class MergedWeights(ComputedReader, Weights):
    """Tensors of the model without updates: merged ones in fp32, and the trained values of
    parameters that were trained as a whole. A few rows and one layer's update are in memory at a
    time."""

    def __init__(
        self, trained: Weights, base: TensorReader, layers: Sequence[Layer], settings: str
    ) -> None:
        self.identity = hashlib.sha256(f"{trained.identity} {settings}".encode()).hexdigest()
        self._trained = trained
        updates = {name for layer in layers for name in layer.shapes}
        whole = [
            renamed(name, name.replace(".base_layer.", "."))
            for name in trained.names()
            if name not in updates
        ]
        self._plain = JoinedReader(ConvertedReader(trained, whole), base)
        self._base = base
        self._layers = {layer.weight: layer for layer in layers}
        self._update: tuple[str, Tensor, Tensor, Tensor | None] | None = None

    @property
    def others(self) -> TensorReader:
        return self._plain

    def names(self) -> Collection[str]:
        return self._plain.names()

    def spec(self, name: str) -> TensorSpec:
        spec = self._plain.spec(name)
        return spec._replace(dtype=torch.float32) if self.computes(name) else spec

    def computes(self, name: str) -> bool:
        return name in self._layers

    def computed(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        layer = self._layers[name]
        size = layer.inputs * layer.outputs
        for number in range(start // size, -(-stop // size)):
            first = number * size
            yield from self._matrix(layer, number, max(start - first, 0), min(stop - first, size))

    def _matrix(self, layer: Layer, number: int, start: int, stop: int) -> Iterator[Tensor]:
        """Elements [start, stop) of a linear layer's weight, or of one expert's."""
        rows, columns = self.spec(layer.weight).shape[-2:]
        down, up, magnitude = self._update_of(layer)
        if layer.experts is not None:
            down, up = down[number], up[number]
        above = number * rows
        for top, bottom in row_blocks(rows, columns, start, stop):
            weight = read_rows(self._base, layer.weight, above + top, above + bottom, columns)
            block = _merged(layer, weight, down, up, magnitude, slice(top, bottom)).view(-1)
            begin = top * columns
            yield block[max(start - begin, 0) : stop - begin]

    def _update_of(self, layer: Layer) -> tuple[Tensor, Tensor, Tensor | None]:
        """A, B and magnitudes of the layer that is being merged."""
        if self._update is None or self._update[0] != layer.name:
            read = self._trained.read
            magnitude = read(layer.magnitude).float() if layer.dora else None
            self._update = layer.name, read(layer.down).float(), read(layer.up).float(), magnitude
        return self._update[1:]

    def close(self) -> None:
        """Leaves the trained tensors open."""
        self._base.close()


def row_blocks(rows: int, columns: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """First and last row + 1 of the blocks of a few MiB in fp32 that hold elements [start, stop).

    Blocks lie at the same rows whatever the range, so that a value does not depend on the range:
    how a product is summed depends on its number of rows.
    """
    height = max(CHUNK // (4 * max(columns, 1)), 1)
    first = start // max(columns, 1) // height * height
    for top in range(first, rows, height):
        if top * columns >= stop:
            return
        yield top, min(top + height, rows)


def read_rows(reader: TensorReader, name: str, top: int, bottom: int, columns: int) -> Tensor:
    """Rows [top, bottom) in fp32, shape (bottom - top, columns)."""
    rows = torch.empty((bottom - top) * columns, dtype=torch.float32)
    reader.read_into(name, top * columns, rows)
    return rows.view(bottom - top, columns)


def _merged(
    layer: Layer, weight: Tensor, down: Tensor, up: Tensor, magnitude: Tensor | None, rows: slice
) -> Tensor:
    """Some rows of a weight, given in fp32, with the update merged in.

    W + s B A (Hu et al. 2021, section 4.1); under DoRA each row of that is then given its own
    length (Liu et al. 2024, eq. 5). A transposed weight has the update transposed.
    """
    if layer.transposed:
        return weight + layer.scaling * (down[:, rows].T @ up.T)
    both = weight + layer.scaling * (up[rows] @ down)
    if magnitude is None:
        return both
    lengths = torch.linalg.vector_norm(both, dim=1, keepdim=True)
    scaled: Tensor = magnitude[rows, None] / lengths * both
    return scaled


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
        return TensorSpec(named(self._layers, name).shapes[name], torch.float32)

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        layer, spec = self._layers[name], self.spec(name)
        if name == layer.magnitude:
            self._base = self._base or self._open_base()
            width = layer.inputs
            for top, bottom in row_blocks(layer.outputs, width, start * width, stop * width):
                rows = read_rows(self._base, layer.weight, top, bottom, width)
                lengths = torch.linalg.vector_norm(rows, dim=1)
                yield lengths[max(start - top, 0) : stop - top]
        elif name == layer.up:
            yield from pieces(torch.zeros(spec.numel), start, stop)
        else:
            generator = torch.Generator().manual_seed(unit_seed(self._seed, name))
            bound = 1 / math.sqrt(layer.inputs)
            values = torch.empty(spec.numel).uniform_(-bound, bound, generator=generator)
            yield from pieces(values, start, stop)

    def close(self) -> None:
        if self._base is not None:
            self._base.close()
            self._base = None

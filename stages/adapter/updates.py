"""Values of an adapter: fresh ones, and the model's weights with it merged."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from pipeline import TensorReader, TensorSpec, Weights
from pipeline.checkpoint import CHUNK
from stages.adapter.compat import Layer
from stages.model.random_reader import unit_seed
from stages.weights.converted import ConvertedReader, renamed
from stages.weights.views import ComputedReader, JoinedReader, named, pieces


class MergedWeights(ComputedReader, Weights):
    """Tensors of the model without updates: merged ones in fp32, and the trained values of
    parameters that were trained as a whole. A few rows and one layer's update are in memory at a
    time. Closes `base`, and leaves the trained tensors open."""

    def __init__(
        self, trained: Weights, base: TensorReader, layers: Sequence[Layer], settings: str
    ) -> None:
        self.identity = hashlib.sha256(f"{trained.identity} {settings}".encode()).hexdigest()
        self._trained, self._base = trained, base
        self._layers = {layer.weight: layer for layer in layers}
        self._update: tuple[str, Tensor, Tensor, Tensor | None] | None = None
        updates = {name for layer in layers for name in layer.shapes}
        whole = [name for name in trained.names() if name not in updates]
        changes = [renamed(name, name.replace(".base_layer.", ".")) for name in whole]
        plain = JoinedReader(ConvertedReader(trained, changes), base)
        merged = {name: plain.spec(name)._replace(dtype=torch.float32) for name in self._layers}
        super().__init__(plain, merged, self._merged)

    def close(self) -> None:
        self._base.close()

    def _merged(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        """Elements of a weight W + s B A (Hu et al. 2021, section 4.1).

        Under DoRA each row of that is then given its own length (Liu et al. 2024, eq. 5). A
        transposed weight has the update transposed.
        """
        layer = self._layers[name]
        rows, columns = self.spec(name).shape[-2:]
        down, up, magnitude = self._update_of(layer)
        size = rows * columns
        for number in range(start // size, -(-stop // size)):  # of the expert
            first, last = max(start - number * size, 0), min(stop - number * size, size)
            a, b = (down, up) if layer.experts is None else (down[number], up[number])
            for top, bottom in row_blocks(rows, columns, first, last):
                above = number * rows
                weight = read_rows(self._base, name, above + top, above + bottom, columns)
                if layer.transposed:
                    both = weight + layer.scaling * (a[:, top:bottom].T @ b.T)
                else:
                    both = weight + layer.scaling * (b[top:bottom] @ a)
                if magnitude is not None:
                    lengths = torch.linalg.vector_norm(both, dim=1, keepdim=True)
                    both = magnitude[top:bottom, None] / lengths * both
                begin = top * columns
                yield both.reshape(-1)[max(first - begin, 0) : last - begin]

    def _update_of(self, layer: Layer) -> tuple[Tensor, Tensor, Tensor | None]:
        """A, B and magnitudes of the layer that is being merged."""
        if self._update is None or self._update[0] != layer.name:
            read = self._trained.read
            magnitude = read(layer.magnitude).float() if layer.dora else None
            self._update = layer.name, read(layer.down).float(), read(layer.up).float(), magnitude
        return self._update[1:]


def row_blocks(rows: int, columns: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield first and last row + 1 of the blocks of a few MiB in fp32 that hold elements
    [start, stop).

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
    """Return rows [top, bottom) in fp32, shape (bottom - top, columns)."""
    rows = torch.empty((bottom - top) * columns, dtype=torch.float32)
    reader.read_into(name, top * columns, rows)
    return rows.view(bottom - top, columns)


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
        layer, size = self._layers[name], self.spec(name).numel
        if name == layer.magnitude:
            self._base = self._base or self._open_base()
            width = layer.inputs
            for top, bottom in row_blocks(layer.outputs, width, start * width, stop * width):
                rows = read_rows(self._base, layer.weight, top, bottom, width)
                lengths = torch.linalg.vector_norm(rows, dim=1)
                yield lengths[max(start - top, 0) : stop - top]
        elif name == layer.up:
            yield from pieces(torch.zeros(size), start, stop)
        else:
            generator = torch.Generator().manual_seed(unit_seed(self._seed, name))
            bound = 1 / math.sqrt(layer.inputs)
            values = torch.empty(size).uniform_(-bound, bound, generator=generator)
            yield from pieces(values, start, stop)

    def close(self) -> None:
        if self._base is not None:
            self._base.close()
            self._base = None

"""A model with trainable updates, as a model source: the values that they begin with, and the
model's weights with them merged."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from pipeline import ModelSource, StageError, TensorReader, TensorSpec, Weights
from pipeline.checkpoint import CHUNK
from pipeline.utils import expanded
from stages.adapter.compat import CONFIG, WEIGHTS, Layer
from stages.adapter.injection import inject, layers
from stages.adapter.peft_files import saved_updates
from stages.adapter.settings import AdaptedModel, LoraSettings
from stages.model.declared import outline, ties
from stages.model.reconcile import unit_seed
from stages.weights.converted import ConvertedReader, renamed
from stages.weights.files import sampled
from stages.weights.views import ComputedReader, JoinedReader, ListedReader, pieces

NUMBERED = frozenset("0123456789?[")
"""Characters of names and patterns that may mean one block and not another."""


class AdaptedSource(AdaptedModel):
    """`base` with updates of some of its linear layers and experts."""

    def __init__(self, stage: LoraSettings, base: ModelSource, *, seed: int) -> None:
        super().__init__(base)
        self.stage, self._seed = stage, seed

    def build(self) -> nn.Module:
        model = self.base.build()
        inject(self.stage, model)
        return model

    @functools.cached_property
    def outline(self) -> nn.Module:  # type: ignore[override]
        return outline(self)

    def tie(self, model: nn.Module) -> None:
        for layer in layers(model):
            if layer.weight in self._shared:
                raise StageError(
                    f"adapter.lora: {layer.name} shares its weight with another module, so an "
                    "update of it cannot be merged",
                    hint="leave it out of `targets`",
                )
        self.base.tie(model)

    @functools.cached_property
    def _shared(self) -> Collection[str]:
        shared = ties(outline(self.base))
        return {*shared, *shared.values()}

    def external_parameter_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        own = (one for one in layers(model) if one.magnitude or one.experts is not None)
        names = (one.name if one.experts is None else one.name.rpartition(".")[0] for one in own)
        within = [model.get_submodule(name) for name in dict.fromkeys(names)]
        return [*within, *self.base.external_parameter_modules(model)]

    @functools.cached_property
    def layers(self) -> Sequence[Layer]:  # type: ignore[override]
        return layers(self.outline)

    @functools.cached_property
    def trained(self) -> Sequence[str]:  # type: ignore[override]
        return [name for name, one in self.outline.named_parameters() if one.requires_grad]

    @functools.cached_property
    def frozen_base(self) -> Collection[str]:
        named = self.outline.named_parameters(remove_duplicate=False)
        return frozenset(name for name, parameter in named if not parameter.requires_grad)

    @property
    def inference_view(self) -> ModelSource:
        return AdaptedSource(self.stage, self.base.inference_view, seed=self._seed)

    @property
    def skeleton(self) -> ModelSource:
        stage = self.stage
        named = (*stage.train_also, *stage.targets, *(stage.target_parameters or ()))
        return self if any(NUMBERED & set(name) for name in named) else self.base.skeleton

    def weights(self) -> TensorReader:
        base = self.base.weights()
        adapted = {layer.name for layer in self.layers if layer.experts is None}
        changes = []
        for name in base.names():
            owner, _, leaf = name.rpartition(".")
            new = f"{owner}.base_layer.{leaf}" if owner in adapted else name
            changes.append(renamed(name, new))
        if self.stage.start_from is None:
            open_base = self.base.inference_view.weights
            updates: TensorReader = InitialValues(self.layers, open_base, seed=self._seed)
        else:
            folder = expanded(self.stage.start_from)
            updates = saved_updates(self, folder)
        # Parameters that were trained as a whole come from the saved adapter, not from the model.
        return JoinedReader(updates, ConvertedReader(base, changes))

    @property
    def fingerprint(self) -> str:
        fields = dataclasses.asdict(self.stage)
        if self.stage.target_parameters is None:  # as before there were any
            del fields["target_parameters"]
        settings = json.dumps(fields, sort_keys=True)
        facts = f"{self.base.fingerprint} lora {settings} {self._seed}"
        return hashlib.sha256(facts.encode()).hexdigest()

    @functools.cached_property
    def sampled_contents(self) -> str | None:
        base = self.base.sampled_contents
        if self.stage.start_from is None:
            return base
        # what the updates begin with is no part of the fingerprint, which old runs know
        folder = expanded(self.stage.start_from)
        own = sampled([folder / WEIGHTS, folder / CONFIG])
        return hashlib.sha256(f"{base} {own}".encode()).hexdigest()

    def merge_trained(self, trained: Weights) -> Weights:
        merged = MergedWeights(
            trained, self.base.inference_view.weights(), self.layers, self.fingerprint
        )
        return self.base.merge_trained(merged)


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
        self.closes = [base]

    def _merged(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        """Elements of a weight W + s B A (Hu et al. 2021, section 4.1).

        Under DoRA each row of that is then given its own length (Liu et al. 2024, eq. 5). A
        transposed weight has the update transposed.
        """
        layer, read = self._layers[name], self._trained.read
        if self._update is None or self._update[0] != name:
            lengths = read(layer.magnitude).float() if layer.magnitude else None
            self._update = name, read(layer.down).float(), read(layer.up).float(), lengths
        _, down, up, magnitude = self._update
        rows, columns = self.spec(name).shape[-2:]
        size = rows * columns
        for number in range(start // size, -(-stop // size)):  # of the expert
            first, last = max(start - number * size, 0), min(stop - number * size, size)
            a, b = (down, up) if layer.experts is None else (down[number], up[number])
            for top, weight in row_blocks(self._base, name, number * rows, rows, first, last):
                bottom = top + len(weight)
                if layer.transposed:
                    both = weight + layer.scaling * (a[:, top:bottom].T @ b.T)
                else:
                    both = weight + layer.scaling * (b[top:bottom] @ a)
                if magnitude is not None:
                    lengths = torch.linalg.vector_norm(both, dim=1, keepdim=True)
                    both = magnitude[top:bottom, None] / lengths * both
                begin = top * columns
                yield both.reshape(-1)[max(first - begin, 0) : last - begin]


def row_blocks(
    reader: TensorReader, name: str, above: int, rows: int, start: int, stop: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield the blocks of a few MiB in fp32 that hold elements [start, stop) of a matrix, which has
    `rows` rows and lies after `above` others of a tensor: the first row, and the values, of shape
    (rows of the block, columns).

    Blocks lie at the same rows whatever the range, so that a value does not depend on the range:
    how a product is summed depends on its number of rows.
    """
    columns = reader.spec(name).shape[-1]
    height = max(CHUNK // (4 * max(columns, 1)), 1)
    for top in range(start // max(columns, 1) // height * height, rows, height):
        if top * columns >= stop:
            return
        flat = torch.empty(min(height, rows - top) * columns, dtype=torch.float32)
        reader.read_into(name, (above + top) * columns, flat)
        yield top, flat.view(-1, columns)


class InitialValues(ListedReader):
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
        self.specs = {
            name: TensorSpec(layer.shapes[name], torch.float32)
            for name, layer in self._layers.items()
        }

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        layer, size = self._layers[name], self.spec(name).numel
        if name == layer.magnitude:
            self._base = self._base or self._open_base()
            width = layer.inputs
            weight, count, span = layer.weight, layer.outputs, (start * width, stop * width)
            for top, rows in row_blocks(self._base, weight, 0, count, *span):
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

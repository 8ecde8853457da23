"""Tensors of an adapter in the files of peft."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from pipeline import StageError, TensorReader
from stages.adapter.compat import PREFIX, WEIGHTS, name_in_file
from stages.adapter.layers import Layer
from stages.model.declared import listed
from stages.weights.change import Change, renamed
from stages.weights.converted import ConvertedReader
from stages.weights.safetensors import SafetensorsReader


def changes_to_file(trained: Sequence[str], layers: Sequence[Layer]) -> Iterator[Change]:
    """The changes that turn the `trained` tensors of the module into those of peft's file.

    peft keeps the factors of all experts as matrices: A is (experts * rank, inputs), B is
    (outputs, rank * experts) with the number of the expert running fastest.
    """
    stacked = _stacked(layers)
    names = names_in_file(trained, layers)
    for name in trained:
        if name not in stacked:
            yield renamed(name, names[name])
        else:
            flatten = _flat_down if name == stacked[name].down else _flat_up
            yield _change(name, names[name], flatten)


def names_in_file(trained: Sequence[str], layers: Sequence[Layer]) -> dict[str, str]:
    """Name of a trained tensor of the module -> its name in peft's file."""
    of_layers = {name: stored for layer in layers for name, stored in layer.in_file.items()}
    return {name: of_layers.get(name) or name_in_file(name) for name in trained}


def saved_updates(
    folder: Path, model: nn.Module, trained: Sequence[str], layers: Sequence[Layer]
) -> TensorReader:
    """The `trained` tensors of `model` from the adapter in `folder`, under the model's names.

    The weight of a head, which peft saves beside its update, is not read. Raises StageError when
    the adapter is of another model or of other settings.
    """
    reader = SafetensorsReader([folder / WEIGHTS])
    stored = {name_in_file(name): name for name in reader.names()}
    wanted = {in_file: name for name, in_file in names_in_file(trained, layers).items()}
    missing = wanted.keys() - stored.keys()
    extra = stored.keys() - wanted.keys() - {PREFIX + layer.weight for layer in layers}
    refusal = f"the adapter in {folder} is not of this model and these settings"
    if missing or extra:
        parts = [f"missing {listed(missing)}"] * bool(missing)
        parts += [f"unexpected {listed(extra)}"] * bool(extra)
        raise StageError(
            f"{refusal}: {'; '.join(parts)}",
            hint="targets, target_parameters, dora and train_also must be those that it was "
            "trained with",
        )
    stacked = _stacked(layers)
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    for in_file, name in wanted.items():
        found = reader.spec(stored[in_file]).shape
        needed = _flat_shape(stacked[name], name) if name in stacked else shapes[name]
        if found != needed:
            raise StageError(f"{refusal}: {name} has shape {list(found)} instead of {list(needed)}")
    changes = [
        _change(stored[in_file], name, partial(_stack, stacked[name], name == stacked[name].down))
        if name in stacked
        else renamed(stored[in_file], name)
        for in_file, name in wanted.items()
    ]
    return ConvertedReader(reader, changes)


def _stacked(layers: Sequence[Layer]) -> dict[str, Layer]:
    """The stacked weight that each factor of experts belongs to."""
    return {name: one for one in layers if one.experts is not None for name in one.shapes}


def _change(old: str, new: str, move: Callable[[Tensor], Tensor]) -> Change:
    return Change(sources=(old,), convert=lambda tensors: {new: move(tensors[old])})


def _flat_down(down: Tensor) -> Tensor:
    return down.flatten(0, 1)


def _flat_up(up: Tensor) -> Tensor:
    return up.permute(1, 2, 0).flatten(1)


def _flat_shape(layer: Layer, name: str) -> tuple[int, int]:
    together = layer.rank * (layer.experts or 1)
    return (together, layer.inputs) if name == layer.down else (layer.outputs, together)


def _stack(layer: Layer, is_down: bool, flat: Tensor) -> Tensor:
    """The factors of each expert from peft's matrix."""
    assert layer.experts is not None
    if is_down:
        return flat.reshape(layer.experts, layer.rank, -1)
    return flat.reshape(-1, layer.rank, layer.experts).permute(2, 0, 1).contiguous()

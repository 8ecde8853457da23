"""Read a model's tensors straight from safetensors files, one at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeline.artifacts import TensorReader
from pipeline.errors import StageError
from stages.model.names import refuse_differences

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a tensor lies."""

    file: Path
    name: str


class SafetensorsReader(TensorReader):
    """Tensors by the names of a module: `places` has where each lies, `shapes` what it must be."""

    def __init__(self, places: Mapping[str, Place], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._places = places
        self._shapes = shapes
        self._open: dict[Path, Any] = {}

    def names(self) -> Collection[str]:
        return self._places.keys()

    def read(self, name: str) -> Tensor:
        if name not in self._places:
            raise StageError(f"no tensor named {name}")
        place = self._places[name]
        if place.file not in self._open:
            self._open[place.file] = open_safetensors(place.file)
        tensor: Tensor = self._open[place.file].get_tensor(place.name)
        if tuple(tensor.shape) != self._shapes[name]:
            raise StageError(
                f"{place.file}: {place.name} has shape {tuple(tensor.shape)}, "
                f"the model needs {self._shapes[name]}"
            )
        return tensor

    def close(self) -> None:
        self._open.clear()


def open_safetensors(file: Path) -> Any:
    """An open safetensors file. Raises StageError when it is not one."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise StageError(f"{file} cannot be read as safetensors: {error}") from error


def direct_reader(
    where: str, files: Sequence[Path], model: nn.Module, tied: Mapping[str, str]
) -> SafetensorsReader:
    """A reader of `files` under the names of `model`; raises StageError when names do not match.

    Files may have been written from the bare base model (no prefix) or from one with a head, and
    may hold a tied tensor under any of its names.
    """
    stored = {name: Place(file=file, name=name) for file in files for name in _keys(file)}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    places = {}
    for name in shapes:
        spelling = next((one for one in _spellings(name, prefix) if one in stored), None)
        if spelling is not None:
            places[name] = stored[spelling]
    used = {place.name for place in places.values()}
    _share_tied(places, tied)
    refuse_differences(where, model, shapes.keys() - places.keys(), stored.keys() - used)
    reader = SafetensorsReader(places, shapes)
    _refuse_untied(where, reader, tied)
    return reader


def _keys(file: Path) -> list[str]:
    return list(open_safetensors(file).keys())


def _spellings(name: str, prefix: str) -> Iterator[str]:
    yield name
    if prefix != ".":
        yield name.removeprefix(prefix) if name.startswith(prefix) else prefix + name


def _share_tied(places: dict[str, Place], tied: Mapping[str, str]) -> None:
    for alias, kept in tied.items():
        if kept not in places and alias in places:
            places[kept] = places[alias]
    for alias, kept in tied.items():
        if alias not in places and kept in places:
            places[alias] = places[kept]


def _refuse_untied(where: str, reader: SafetensorsReader, tied: Mapping[str, str]) -> None:
    for alias, kept in tied.items():
        one, other = reader._places[alias], reader._places[kept]
        if one != other and not torch.equal(reader.read(alias), reader.read(kept)):
            raise StageError(
                f"the model shares one tensor between {alias} and {kept}, "
                f"but {where} holds different values for them",
                hint="set tie_word_embeddings to false in its config.json",
            )

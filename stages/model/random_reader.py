"""Random initial weights as a pure function of seed and module name.

A tensor has the same value on every rank and in every world size, and whatever is read before it:
each transformer block, and each module outside the blocks, is initialised from a seed of its own
by the architecture's own rule, which keeps its depth-dependent scaling.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from pipeline import StageError, TensorReader, TensorSpec
from stages.model import compat
from stages.weights.torch_files import named, pieces

if TYPE_CHECKING:
    from torch import Tensor, nn


class RandomReader(TensorReader):
    """Tensors of a `model` with meta parameters and real buffers; holds one block at a time."""

    def __init__(
        self, model: nn.Module, blocks: Collection[nn.Module], tied: Mapping[str, str], *, seed: int
    ) -> None:
        self._model = model
        self._blocks = set(map(id, blocks))
        self._tied = tied
        self._seed = seed
        self._state: Mapping[str, Tensor] = model.state_dict()
        self._unit_of = _units(model, self._blocks)
        self._unit = ""
        self._tensors: dict[str, Tensor] = {}

    def names(self) -> Collection[str]:
        return self._state.keys()

    def spec(self, name: str) -> TensorSpec:
        tensor = named(self._state, name)
        return TensorSpec(tuple(tensor.shape), tensor.dtype)

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        name = self._tied.get(name, name)
        unit = self._unit_of.get(name)
        if unit is not None and (unit != self._unit or not self._tensors):
            self._tensors = {}  # frees the old block before the new one is made
            self._tensors = self._initialised(unit)
            self._unit = unit
        values = named(self._state, name) if unit is None else self._tensors[name]
        yield from pieces(values, start, stop)

    def close(self) -> None:
        self._tensors = {}

    def _initialised(self, unit: str) -> dict[str, Tensor]:
        original = self._model.get_submodule(unit)
        whole = id(original) in self._blocks
        module = copy.deepcopy(original)
        _allocate(module, recurse=whole)
        owner = compat.nearest_model(self._model, unit)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(unit_seed(self._seed, unit))
            if whole:
                compat.initialise(owner, module)
            else:
                owner._init_weights(module)  # type: ignore[operator]
        prefix = f"{unit}." if unit else ""
        found = {prefix + name: p.detach() for name, p in module.named_parameters(recurse=whole)}
        for name, values in found.items():
            if values.isnan().any():
                raise StageError(
                    f"{type(self._model).__name__} does not say how to initialise {name}",
                    hint="start from pretrained weights",
                )
        return found


def unit_seed(seed: int, unit: str) -> int:
    """64-bit seed of a module: the first 8 bytes of sha256 over the run's seed and its name."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{unit}".encode()).digest()[:8], "big")


def _units(model: nn.Module, blocks: Collection[int]) -> dict[str, str]:
    """Parameter name -> name of the block, or module outside blocks, that draws it."""
    block_names = [name for name, module in model.named_modules() if id(module) in blocks]
    units = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        inside = (block for block in block_names if name.startswith(f"{block}."))
        units[name] = next(inside, name.rpartition(".")[0])
    return units


def _allocate(module: nn.Module, *, recurse: bool) -> None:
    """Give the parameters memory, filled with NaN so that one that is not initialised shows."""
    for child in module.modules() if recurse else [module]:
        for name, parameter in child.named_parameters(recurse=False):
            values = torch.full(parameter.shape, math.nan, dtype=torch.float32)
            setattr(child, name, torch.nn.Parameter(values))

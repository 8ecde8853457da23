"""Random initial weights as a pure function of seed and module name.

A tensor has the same value on every rank and in every world size, and whatever is read before it:
each transformer block, and each module outside the blocks, is initialised from its own seed by the
architecture's own rule, which keeps its depth-dependent scaling.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from pipeline import StageError
from stages.model import compat
from stages.weights.views import MemoryReader, named, pieces

if TYPE_CHECKING:
    from torch import Tensor, nn


def unit_seed(seed: int, unit: str) -> int:
    """Return 8 bytes of sha256 over the run's seed and a module's name, as a seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{unit}".encode()).digest()[:8], "big")


class RandomReader(MemoryReader):
    """Tensors of a `model` with meta parameters and real buffers; holds one block at a time."""

    def __init__(
        self, model: nn.Module, blocks: Collection[nn.Module], tied: Mapping[str, str], *, seed: int
    ) -> None:
        super().__init__(model.state_dict())
        self._model, self._blocks, self._tied, self._seed = model, set(blocks), tied, seed
        names = [name for name, module in model.named_modules() if module in self._blocks]
        self._unit_of: dict[str, str] = {}
        """Parameter -> name of the block, or module outside blocks, that draws it."""
        for name, _ in model.named_parameters(remove_duplicate=False):
            inside = (block for block in names if name.startswith(f"{block}."))
            self._unit_of[name] = next(inside, name.rpartition(".")[0])
        self._unit = ""
        self._drawn: dict[str, Tensor] = {}

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        name = self._tied.get(name, name)
        unit = self._unit_of.get(name)
        if unit is not None and (unit != self._unit or not self._drawn):
            self._drawn = {}  # frees the old block before the new one is made
            self._drawn = self._initialised(unit)
            self._unit = unit
        yield from pieces(named(self._tensors if unit is None else self._drawn, name), start, stop)

    def close(self) -> None:
        self._drawn = {}

    def _initialised(self, unit: str) -> dict[str, Tensor]:
        original = self._model.get_submodule(unit)
        whole = original in self._blocks
        module = copy.deepcopy(original)
        for child in module.modules() if whole else [module]:
            for name, one in child.named_parameters(recurse=False):
                # NaN, so that a parameter that is not initialised shows.
                values = torch.full(one.shape, math.nan, dtype=torch.float32)
                setattr(child, name, torch.nn.Parameter(values))
        owner: Any = compat.nearest_model(self._model, unit)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(unit_seed(self._seed, unit))
            if whole:
                compat.initialise(owner, module)
            else:
                owner._init_weights(module)
        prefix = f"{unit}." if unit else ""
        found = {prefix + name: p.detach() for name, p in module.named_parameters(recurse=whole)}
        for name, values in found.items():
            if values.isnan().any():
                raise StageError(
                    f"{type(self._model).__name__} does not say how to initialise {name}",
                    hint="start from pretrained weights",
                )
        return found

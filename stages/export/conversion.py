"""From the module's tensors to those that the architecture's files have, a few at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pipeline.artifacts import Weights
from pipeline.errors import StageError
from pipeline.state.dtypes import CODES
from stages.export.layout import Spec
from stages.model import compat
from stages.model.names import refuse_differences, ties

if TYPE_CHECKING:
    from torch import Tensor, nn

BLOCK = re.compile(r"(.*?\.\d+)\.")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Tensors that must be in memory together: `sources` become `specs`."""

    sources: Sequence[str]
    specs: Sequence[Spec]
    converted: bool


class Conversion:
    """The plan for one model: what is read, what is written, in which order.

    `outline` is the module on the meta device with its weights tied. Raises StageError when names
    or shapes of `weights` differ from the module's.
    """

    def __init__(self, outline: nn.Module, weights: Weights, dtype: torch.dtype) -> None:
        self._outline = outline
        self._weights = weights
        self._dtype = dtype
        self.spelling = _spelling(outline, weights)
        self.groups = sorted(self._plan(), key=lambda group: -group.specs[0].dtype.itemsize)

    @property
    def specs(self) -> list[Spec]:
        """Every tensor of the files, in the order in which `tensors` yields them."""
        return [spec for group in self.groups for spec in group.specs]

    def tensors(self) -> Iterator[tuple[Spec, Tensor]]:
        """Read, cast and convert; holds one group at a time."""
        for group in self.groups:
            tensors = {name: self.read(name) for name in group.sources}
            if group.converted:
                tensors = compat.to_file_layout(self._outline, tensors)
            for spec in group.specs:
                yield spec, tensors.pop(spec.name)

    def read(self, name: str) -> Tensor:
        """A tensor of the module in the dtype of the export."""
        tensor = self._weights.read(self.spelling[name])
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def _plan(self) -> Iterator[Group]:
        # Without a device and without data, the same conversion tells names and shapes.
        outline = self._outline.state_dict()
        before = {name: self._meta(outline[name]) for name in self.spelling}
        after = compat.to_file_layout(self._outline, before)
        unchanged = [n for n in before if n in after and after[n].shape == before[n].shape]
        for name in unchanged:
            yield Group(sources=[name], specs=[_spec(name, before[name])], converted=False)
        changed = {name: before[name] for name in before if name not in set(unchanged)}
        for block in _blocks(changed):
            result = compat.to_file_layout(self._outline, block)
            specs = [_spec(name, tensor) for name, tensor in result.items()]
            yield Group(sources=list(block), specs=specs, converted=True)

    def _meta(self, tensor: Tensor) -> Tensor:
        dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=dtype, device="meta")


def _spec(name: str, tensor: Tensor) -> Spec:
    if tensor.dtype not in CODES:
        raise StageError(f"{name} has dtype {tensor.dtype}, which safetensors files cannot hold")
    return Spec(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)


def _spelling(outline: nn.Module, weights: Weights) -> dict[str, str]:
    """Name to write -> name to read; a tied tensor once, under the name that files keep."""
    tied = ties(outline)
    given = set(weights.names())
    expected = outline.state_dict()
    found: dict[str, str] = {}
    for name in expected:
        kept = tied.get(name, name)
        if name in given and (kept not in found or name == kept):
            found[kept] = name
    missing = {name for name in expected if tied.get(name, name) not in found}
    refuse_differences("the checkpoint", outline, missing, given - expected.keys())
    for kept, name in found.items():
        shape = tuple(expected[kept].shape)
        if tuple(weights.shape(name)) != shape:
            raise StageError(
                f"{name} has shape {tuple(weights.shape(name))} in the checkpoint, "
                f"the model needs {shape}"
            )
    return {name: found[name] for name in expected if name in found}


def _blocks(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Tensors by transformer block; those outside any block together."""
    blocks: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = BLOCK.match(name)
        blocks.setdefault(match[1] if match else "", {})[name] = tensor
    return list(blocks.values())

"""What an export is going to write, known before any weight is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pipeline.artifacts import ModelSource, TensorReader, Weights, dtype_name, torch_dtype
from stages.export.conversion import file_weights, module_weights
from stages.export.layout import Named, Shard, digest, shards
from stages.model.names import ties
from stages.model.outline import outline

if TYPE_CHECKING:
    from torch import nn

AS_SOURCE = "source"
"""In place of a dtype: each tensor keeps that of the source."""


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """Readers of the tensors, and the files they go to."""

    outline: nn.Module
    """The module on the meta device, its weights tied."""
    tensors: TensorReader
    """By the names of the module."""
    files: TensorReader
    """By the names in the files."""
    parts: Sequence[Shard]
    dtype: str
    """Of most of the weights, as in a recipe."""
    digest: str
    """Equal for plans that write the same bytes."""

    @property
    def total(self) -> int:
        """Bytes of all weight files."""
        return sum(part.size + len(part.header()) for part in self.parts)


def make_plan(
    source: ModelSource, weights: Weights, dtype: str, max_shard_size: int, *, beside: str
) -> ExportPlan:
    """`dtype` is one of a recipe, or AS_SOURCE; `beside` is a digest of what else the export
    depends on. Raises StageError when `weights` are not those of the source's architecture."""
    model = outline(source)
    tensors = module_weights(model, weights, _dtypes(dtype, source, model))
    files = file_weights(model, tensors)
    named = [Named(name, *files.spec(name)) for name in files.names()]
    # Elements of each tensor must lie at multiples of their size.
    named.sort(key=lambda tensor: -tensor.dtype.itemsize)
    parts = shards(named, max_shard_size)
    return ExportPlan(
        outline=model,
        tensors=tensors,
        files=files,
        parts=parts,
        dtype=_most(named),
        digest=digest(parts, weights.identity, beside),
    )


def _dtypes(asked: str, source: ModelSource, model: nn.Module) -> Callable[[str], torch.dtype]:
    if asked != AS_SOURCE:
        one = torch_dtype(asked)
        return lambda name: one
    reader = source.weights()
    own = {name: reader.spec(name).dtype for name in reader.names()}
    reader.close()
    shared = ties(model)
    own |= {kept: own[alias] for alias, kept in shared.items() if kept not in own}
    return own.__getitem__


def _most(tensors: Sequence[Named]) -> str:
    sizes = Counter[str]()
    for tensor in tensors:
        sizes[dtype_name(tensor.dtype)] += tensor.size
    return max(("fp32", "bf16", "fp16"), key=lambda name: sizes[name])

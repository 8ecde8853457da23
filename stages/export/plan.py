"""What an export is going to write, known before any weight is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pipeline.checkpoint.layout import CODES
from pipeline.contracts.model import ModelSource
from pipeline.contracts.precision import dtype_name, torch_dtype
from pipeline.contracts.stage import Context, ResourceNeed
from pipeline.contracts.tensors import TensorReader, Weights
from pipeline.errors import StageError
from stages.export.layout import Named, Shard, digest, shards
from stages.export.target import target_of
from stages.model import compat
from stages.model.declared import misfit, outline, refuse_differences, ties
from stages.weights.change import renamed
from stages.weights.converted import ConvertedReader
from stages.weights.views import CastReader

if TYPE_CHECKING:
    import torch
    from torch import nn

    from stages.export.safetensors import ExportSafetensors


def module_weights(
    outline: nn.Module, weights: Weights, dtype: Callable[[str], torch.dtype]
) -> TensorReader:
    """The tensors of `outline`, a module on the meta device with its weights tied: each once, under
    the name that files keep, in the dtype that `dtype` gives that name.

    Raises StageError when names or shapes of `weights` differ from the module's.
    """
    names = _spelling(outline, weights)
    chosen = ConvertedReader(weights, [renamed(found, kept) for kept, found in names.items()])
    return CastReader(chosen, dtype)


def file_weights(outline: nn.Module, tensors: TensorReader) -> TensorReader:
    """What `module_weights` gave, under the names and with the shapes that files have."""
    reader = ConvertedReader(tensors, compat.changes_on_save(outline, tensors.names()))
    for name in reader.names():
        dtype = reader.spec(name).dtype
        if dtype not in CODES:
            raise StageError(f"{name} has dtype {dtype}, which safetensors files cannot hold")
    return reader


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
    shapes = {kept: (tuple(expected[kept].shape), weights.spec(name).shape)
              for kept, name in found.items()}  # fmt: skip
    misshapen = [misfit(name, has, needs) for name, (needs, has) in shapes.items() if has != needs]
    extra = given - expected.keys()
    if any(".lora_" in name for name in extra):
        raise StageError(
            "the checkpoint holds an adapter (LoRA), without the model that it changes",
            hint="export the run that saved it: its recipe says what is merged, and how",
        )
    refuse_differences("the checkpoint", outline, missing, extra, misshapen)
    return {name: found[name] for name in expected if name in found}


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


BUFFERS = 64 << 20
"""Bytes for what is on its way, and activations of a short prompt."""


def room(stage: ExportSafetensors, ctx: Context, source: ModelSource) -> ResourceNeed:
    """Disk for the weight files; memory for the proof with one block at a time."""
    model = outline(source.export_view)
    widest = torch.float32 if stage.dtype == AS_SOURCE else torch_dtype(stage.dtype)
    folder = target_of(stage.folder, ctx)
    return ResourceNeed(
        what=f"the export in {folder.name}",
        disk=_size(model, widest),
        folder=folder,
        memory=_resident(model, widest) + BUFFERS,
    )


def _size(module: nn.Module, dtype: torch.dtype) -> int:
    return sum(tensor.numel() for tensor in module.parameters()) * dtype.itemsize


def _resident(model: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of what lies outside the blocks, and of the largest block."""
    kinds = compat.block_classes(model)
    blocks = [_size(m, dtype) for m in model.modules() if type(m).__name__ in kinds]
    return _size(model, dtype) - sum(blocks) + max(blocks, default=0)

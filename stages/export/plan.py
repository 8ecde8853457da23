"""The plan of an export: which tensor goes to which file, known before any weight is read."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeline import (
    Context,
    ModelSource,
    ResourceNeed,
    StageError,
    TensorReader,
    TensorSpec,
    Weights,
    dtype_name,
    torch_dtype,
)
from pipeline.checkpoint import CODES
from stages.export.target import target_of
from stages.export.weight_files import Shard
from stages.model import compat
from stages.model.as_exported import AS_SOURCE, module_tensors
from stages.model.declared import outline
from stages.weights.converted import ConvertedReader
from stages.weights.views import JoinedReader

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
BUFFERS = 64 << 20
"""Bytes for tensors in transit, and for activations of a short prompt."""


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
    """Dtype of most of the weights, as in a recipe."""
    digest: str
    """Equal for plans that write the same bytes."""
    passed: Sequence[str] = ()
    """Names in the files of tensors that are the source's, byte for byte."""

    @property
    def total(self) -> int:
        """Bytes of all weight files."""
        return sum(part.total for part in self.parts)


def make_plan(
    source: ModelSource, weights: Weights, dtype: str, max_shard_size: int, *, beside: str
) -> ExportPlan:
    """The plan of a model's export in `dtype`, which is one of a recipe or AS_SOURCE; `beside` is a
    digest of everything else that the export depends on. Raises StageError when `weights` are not
    of the source's architecture."""
    model, tensors = module_tensors(source, weights, dtype)
    files: TensorReader = ConvertedReader(tensors, compat.changes_on_save(model, tensors.names()))
    own, passed = files.names(), source.passed_through()
    if passed is not None:
        twice = sorted(set(own) & set(passed.names()))
        if twice:
            raise StageError(f"{twice[0]} is a tensor of the model, and of the rest of its source")
        files = JoinedReader(files, passed)
    specs = {name: files.spec(name) for name in files.names()}
    for name, spec in specs.items():
        if spec.dtype not in CODES:
            raise StageError(f"{name} has dtype {spec.dtype}, which safetensors files cannot hold")
    parts = shards(specs, max_shard_size)
    return ExportPlan(
        outline=model,
        tensors=tensors,
        files=files,
        parts=parts,
        dtype=_most_common(specs[name] for name in own),
        digest=digest(parts, weights.identity, beside),
        passed=[] if passed is None else sorted(passed.names()),
    )


def _most_common(specs: Iterable[TensorSpec]) -> str:
    sizes = Counter[str]()
    for spec in specs:
        sizes[dtype_name(spec.dtype)] += spec.nbytes
    return max(("fp32", "bf16", "fp16"), key=lambda name: sizes[name])


def shards(tensors: Mapping[str, TensorSpec], max_size: int) -> list[Shard]:
    """Cut `tensors` into files of at most `max_size` bytes; a larger tensor has a file to itself.
    Wide dtypes come first, as the elements of a tensor must lie at multiples of their size."""
    groups: list[dict[str, TensorSpec]] = [{}]
    filled = 0
    for name, spec in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        if groups[-1] and filled + spec.nbytes > max_size:
            groups.append({})
            filled = 0
        groups[-1][name] = spec
        filled += spec.nbytes
    if len(groups) == 1:
        return [Shard(file=SINGLE, tensors=groups[0])]
    count = len(groups)
    return [
        Shard(file=f"model-{number:05}-of-{count:05}.safetensors", tensors=group)
        for number, group in enumerate(groups, start=1)
    ]


def index(parts: Sequence[Shard]) -> Mapping[str, Any]:
    """Content of the index file of a model in several files."""
    return {
        "metadata": {"total_size": sum(part.size for part in parts)},
        "weight_map": {name: part.file for part in parts for name in part.tensors},
    }


def digest(parts: Sequence[Shard], *facts: str) -> str:
    """Equal for exports that write the same bytes."""
    description = [
        [part.file, [[name, spec.shape, str(spec.dtype)] for name, spec in part.tensors.items()]]
        for part in parts
    ]
    return hashlib.sha256(json.dumps([description, facts]).encode()).hexdigest()


def resource_need(
    dtype: str, folder: str | None, ctx: Context, source: ModelSource
) -> ResourceNeed:
    """Disk for the weight files; memory for one block and all outside of blocks."""
    model = outline(source.export_view)
    widest = torch.float32 if dtype == AS_SOURCE else torch_dtype(dtype)

    def size(module: nn.Module) -> int:
        return sum(tensor.numel() for tensor in module.parameters()) * widest.itemsize

    kinds = compat.block_classes(model)
    blocks = [size(module) for module in model.modules() if type(module).__name__ in kinds]
    target, passed = target_of(folder, ctx), source.export_view.passed_through()
    if passed is not None:
        passed.close()
    others = [] if passed is None else [passed.spec(name).nbytes for name in passed.names()]
    return ResourceNeed(
        what=f"the export in {target.name}",
        disk=size(model) + sum(others),
        folder=target,
        memory=size(model) - sum(blocks) + max(blocks, default=0) + BUFFERS,
    )

"""Prove again that an export is whole and computes what it did when it was made."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from xxhash import xxh3_64_hexdigest

from pipeline.checkpoint.layout import DTYPES
from pipeline.distributed.process_group import DistContext
from pipeline.errors import ExportError
from stages.export import manifest
from stages.export.card import CARD
from stages.export.layout import INDEX, Named, Shard, index
from stages.export.logits import loaded, logits
from stages.export.manifest import BLOCK, Manifest, Proof, WeightFile, names_in
from stages.export.proof import fits, prove_files, recognise
from stages.model import compat

if TYPE_CHECKING:
    from torch import nn


def verify(folder: Path, tell: Callable[[str], object], *, trust_remote_code: bool) -> None:
    """Read every byte, then load the model and run it. `tell` is told what has been proven.

    Raises ExportError for whatever is not as it was.
    """
    proof = prove_whole(folder, tell)
    outline = _outline(folder, trust_remote_code=trust_remote_code)
    with loaded(folder, outline, whole=fits(folder)) as model:
        told = logits(model, torch.tensor([proof.prompt]))
        difference = recognise(told, proof.logits, _coarsest(model))
    tell(f"{type(outline).__name__} computes what it did (largest difference {difference:.2g})")


def prove_whole(folder: Path, tell: Callable[[str], object], *, alone: bool = True) -> Proof:
    """Every file is there as it was written and, if `alone`, no other; without `alone` the model
    card may say something else. Raises ExportError."""
    found = manifest.load(folder)
    if found is None or found.proof is None:
        raise ExportError(f"{folder}: no finished export: it holds no {manifest.NAME} of one")
    if found.block != BLOCK:
        raise ExportError(f"{folder}: written by another version, with other checksums")
    if alone:
        _prove_alone(folder, found)
    _prove_others(folder, found, free=() if alone else (CARD,))
    tell(f"{len(found.others)} files beside the weights are as they were written")
    parts = [_shard(name, entry) for name, entry in found.weights.items()]
    sums = {name: entry.sums for name, entry in found.weights.items()}
    prove_files(folder, parts, sums, DistContext(device=torch.device("cpu")))
    _prove_index(folder, parts)
    tensors = sum(len(part.tensors) for part in parts)
    tell(f"{tensors} tensors in {len(parts)} file(s) are as they were written")
    return found.proof


def _coarsest(model: nn.Module) -> torch.dtype:
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _prove_alone(folder: Path, found: Manifest) -> None:
    strange = sorted(names_in(folder) - set(found.files))
    if strange:
        raise ExportError(f"{folder}: {strange[0]} is not of this export")


def _prove_others(folder: Path, found: Manifest, free: Collection[str]) -> None:
    for name, wanted in found.others.items():
        file = folder / name
        if name in free:
            continue
        if not file.is_file():
            raise ExportError(f"{file}: missing")
        if xxh3_64_hexdigest(file.read_bytes()) != wanted:
            raise ExportError(f"{file}: is not as it was written")


def _prove_index(folder: Path, parts: list[Shard]) -> None:
    if len(parts) == 1:
        return
    try:
        content: Any = json.loads((folder / INDEX).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ExportError(f"{folder / INDEX}: cannot be read: {error}") from error
    if content != index(parts):
        raise ExportError(f"{folder / INDEX} does not say where the tensors are")


def _shard(name: str, entry: WeightFile) -> Shard:
    for code, _ in entry.tensors.values():
        if code not in DTYPES:
            raise ExportError(f"{name}: has tensors of {code}, which is not known here")
    tensors = [
        Named(tensor, shape, DTYPES[code]) for tensor, (code, shape) in entry.tensors.items()
    ]
    return Shard(file=name, tensors=tensors)


def _outline(folder: Path, *, trust_remote_code: bool) -> nn.Module:
    """The module that the folder's config describes, on the meta device."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with compat.quiet(), init_empty_weights(include_buffers=False):
            config = AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
            model: nn.Module = AutoModelForCausalLM.from_config(
                config, trust_remote_code=trust_remote_code
            )
    except (OSError, ValueError, KeyError, ImportError) as error:
        hint = "--trust-remote-code" if "trust_remote_code" in str(error) else ""
        raise ExportError(f"{folder}: transformers cannot read it: {error}", hint=hint) from error
    return model

"""Prove that a written model is the trained one: by its bytes, then by loading and running it."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeline.errors import ExportError, StageError
from pipeline.state.dtypes import CODES
from stages.export.layout import Shard
from stages.export.writer import Digests
from stages.model import compat
from stages.model.names import listed, refuse_differences

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pipeline.artifacts import ModelSource
    from stages.export.conversion import Conversion

CHUNK = 8 << 20
TOLERANCE = 1e-5
"""Largest difference of logits, relative to the largest of them; the same kernels run on the same
numbers, so only their scheduling can tell them apart."""


def prove_files(folder: Path, parts: Sequence[Shard], digests: Digests) -> None:
    """Read every file back: names, shapes, dtypes, and the bytes of each tensor.

    Raises ExportError.
    """
    for part in parts:
        file = folder / part.file
        _prove_header(file, part)
        _prove_bytes(file, part, digests)


def _prove_header(file: Path, part: Shard) -> None:
    from safetensors import SafetensorError, safe_open

    expected = {spec.name: (CODES[spec.dtype], spec.shape) for spec in part.specs}
    try:
        with safe_open(str(file), framework="pt", device="cpu") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            found = {n: (s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ExportError(f"{file} cannot be read back: {error}") from error
    wrong = {
        name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
    }
    if wrong:
        raise ExportError(f"{file} differs from what was written in {listed(wrong)}")


def _prove_bytes(file: Path, part: Shard, digests: Digests) -> None:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
        wrong = []
        for spec in part.specs:
            start, end = header[spec.name]["data_offsets"]
            stream.seek(8 + length + start)
            if _digest(stream, end - start) != digests[spec.name]:
                wrong.append(spec.name)
    if wrong:
        raise ExportError(
            f"{file} does not hold the trained values in {listed(wrong)}",
            hint="the disk or the memory of this machine is not to be trusted",
        )


def _digest(stream: Any, size: int) -> bytes:
    digest = hashlib.blake2b()
    while size > 0:
        data = stream.read(min(size, CHUNK))
        if not data:
            break
        digest.update(data)
        size -= len(data)
    return digest.digest()


def prove_model(
    folder: Path, source: ModelSource, conversion: Conversion, outline: nn.Module, prompt: str
) -> float:
    """Load the folder as a user would and compare logits on the prompt with a reference.

    The reference is the declared module filled from the checkpoint, in the loaded one's dtypes.
    Both run with plain attention on the CPU, one after the other. Returns the largest difference.
    Raises ExportError.
    """
    ids = _token_ids(source, prompt)
    loaded = _load(folder, outline)
    dtypes = {name: tensor.dtype for name, tensor in loaded.state_dict().items()}
    found = _logits(loaded, ids)
    del loaded
    gc.collect()
    expected = _logits(_reference(source, conversion, dtypes), ids)
    return _compare(found, expected)


def _token_ids(source: ModelSource, prompt: str) -> Tensor:
    """Shape (1, length)."""
    try:
        ids = source.tokenizer()(prompt)["input_ids"]
    except StageError:
        ids = [(7 * position + 3) % source.vocab_size for position in range(16)]
    return torch.tensor([ids or [0]])


def _load(folder: Path, outline: nn.Module) -> nn.Module:
    from transformers import AutoModelForCausalLM

    kind: Any = type(outline) if compat.is_remote_code(outline) else AutoModelForCausalLM
    try:
        with compat.quiet():
            model, info = kind.from_pretrained(
                folder, dtype="auto", local_files_only=True, output_loading_info=True
            )
        refuse_differences(str(folder), model, info["missing_keys"], info["unexpected_keys"])
    except (OSError, ValueError, RuntimeError, ImportError, StageError) as error:
        raise ExportError(f"transformers cannot load the export: {error}") from error
    if type(model).__name__ != type(outline).__name__:
        raise ExportError(
            f"the export loads as {type(model).__name__}, trained was {type(outline).__name__}"
        )
    loaded: nn.Module = model
    return loaded


def _reference(
    source: ModelSource, conversion: Conversion, dtypes: Mapping[str, torch.dtype]
) -> nn.Module:
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = source.build()
    state = {name: conversion.read(name).to(dtypes[name]) for name in conversion.spelling}
    model.load_state_dict(state, strict=False, assign=True)
    source.tie(model)
    return model


def _logits(model: Any, ids: Tensor) -> Tensor:
    """In fp32, shape (1, length, vocabulary)."""
    model.eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        result: Tensor = model(input_ids=ids, use_cache=False).logits
    return result.float()


def _compare(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        raise ExportError(
            f"the exported model gives logits of shape {tuple(found.shape)}, "
            f"the trained one {tuple(expected.shape)}"
        )
    if not bool(torch.isfinite(found).all()):
        raise ExportError("the exported model gives logits that are not finite")
    difference = float((found - expected).abs().max())
    scale = max(1.0, float(expected.abs().max()))
    if not difference <= TOLERANCE * scale:
        raise ExportError(
            f"the exported model computes something else than the trained one: "
            f"logits differ by up to {difference:.3g}"
        )
    return difference

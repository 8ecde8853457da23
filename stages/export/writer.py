"""Write safetensors files tensor by tensor, without holding more than one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipeline.errors import StageError
from stages.export.layout import INDEX, Shard, Spec, index

if TYPE_CHECKING:
    from torch import Tensor

Digests = dict[str, bytes]
"""Tensor name -> BLAKE2b over its bytes in memory."""


def write(folder: Path, parts: Sequence[Shard], tensors: Iterable[tuple[Spec, Tensor]]) -> Digests:
    """Write every shard, and the index when there are several.

    `tensors` come in the order of the shards. Returns digests of what was to be written, for the
    comparison with what a reader finds. Raises StageError when the disk does not take it.
    """
    stream = iter(tensors)
    digests: Digests = {}
    try:
        for part in parts:
            digests.update(_write_shard(folder / part.file, part, stream))
        if len(parts) > 1:
            text = json.dumps(index(parts), indent=2) + "\n"
            (folder / INDEX).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StageError(f"cannot write the export in {folder}: {error}") from error
    return digests


def _write_shard(file: Path, part: Shard, stream: Iterator[tuple[Spec, Tensor]]) -> Digests:
    digests = {}
    with file.open("wb") as out:
        out.write(part.header())
        for planned in part.specs:
            spec, tensor = next(stream)
            assert spec == planned, f"{spec.name} came where {planned.name} was planned"
            data = _bytes(spec, tensor)
            out.write(data)
            digests[spec.name] = hashlib.blake2b(data).digest()
            del tensor, data  # before the next one is read
        out.flush()
        os.fsync(out.fileno())
    return digests


def _bytes(spec: Spec, tensor: Tensor) -> memoryview:
    """The tensor's bytes, row-major, without a copy where it is contiguous."""
    if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
        raise StageError(
            f"{spec.name} is {tensor.dtype} {tuple(tensor.shape)}, "
            f"planned was {spec.dtype} {spec.shape}"
        )
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]

"""One whole tensor of a state in memory, for formats that are written tensor by tensor."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from pipeline.errors import CheckpointError
from pipeline.state.dtypes import dtype
from pipeline.state.source import StateSource

_NAME = re.compile(r"(?!\.)[\w.-]{1,200}", re.ASCII)


def assembled(source: StateSource, key: str) -> Tensor:
    """The tensor `key` with its shape."""
    entry = source.tensors[key]
    flat = torch.empty(entry.numel, dtype=dtype(entry.dtype))
    memory = flat.view(torch.uint8)
    done = 0
    for _, data in source.read(key, 0, entry.numel):
        memory[done : done + len(data)] = torch.frombuffer(data, dtype=torch.uint8)
        done += len(data)
    if done != memory.numel():
        raise CheckpointError(f"{source.where}: {key} is incomplete")
    return flat.view(tuple(entry.shape))


def require_file_name(name: str, where: str) -> str:
    """A tensor's name that is to be the name of a folder. Raises CheckpointError for one that would
    lead elsewhere."""
    if not _NAME.fullmatch(name):
        raise CheckpointError(f"{where}: {name!r} cannot be the name of a folder")
    return name

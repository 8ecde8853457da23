"""One whole tensor of a state in memory, for formats that are written tensor by tensor."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from pipeline.errors import CheckpointError
from pipeline.state.dtypes import as_bytes, dtype
from pipeline.state.source import StateSource

_NAME = re.compile(r"(?!\.)[\w.-]{1,200}", re.ASCII)


def assembled(source: StateSource, key: str) -> Tensor:
    """The tensor `key` with its shape."""
    entry = source.entry(key)
    flat = torch.empty(entry.numel, dtype=dtype(entry.dtype))
    source.read_into(key, 0, as_bytes(flat))
    return flat.view(tuple(entry.shape))


def require_file_name(name: str, where: str) -> str:
    """A tensor's name that is to be the name of a folder. Raises CheckpointError for one that would
    lead elsewhere."""
    if not _NAME.fullmatch(name):
        raise CheckpointError(f"{where}: {name!r} cannot be the name of a folder")
    return name

"""The live side of consolidate.sharded."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from pipeline.artifacts import Weights
from pipeline.engine import WEIGHT
from pipeline.errors import CheckpointError
from pipeline.state.dtypes import dtype
from pipeline.state.reader import CheckpointReader
from pipeline.state.store import locate


class ShardedWeights(Weights):
    """Parameters and stored buffers of a checkpoint, tied names each listed."""

    def __init__(self, address: str) -> None:
        self._reader = CheckpointReader(*locate(address))
        keys = (entry.key.partition("/") for entry in self._reader.manifest.tensors)
        own = {name: name for kind, _, name in keys if kind == WEIGHT}
        self._names = own | dict(self._reader.manifest.state.aliases)

    def names(self) -> Collection[str]:
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._reader.tensors[self._key(name)].shape)

    def read(self, name: str) -> Tensor:
        key = self._key(name)
        entry = self._reader.tensors[key]
        flat = torch.empty(entry.numel, dtype=dtype(entry.dtype))
        for first, data in self._reader.read(key, 0, entry.numel):
            part = torch.frombuffer(data, dtype=flat.dtype)
            flat[first : first + part.numel()].copy_(part)
        return flat.view(entry.shape)

    def close(self) -> None:
        self._reader.close()

    def _key(self, name: str) -> str:
        if name not in self._names:
            raise CheckpointError(f"{self._reader.where}: holds no tensor {name}")
        return f"{WEIGHT}/{self._names[name]}"

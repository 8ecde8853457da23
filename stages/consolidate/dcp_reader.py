"""The live side of consolidate.dcp. Reads only folders that this run wrote (see checkpoint.dcp)."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from pipeline.artifacts import Weights
from pipeline.errors import CheckpointError

PREFIX = "model."


class DcpWeights(Weights):
    """The model part of a checkpoint; each read assembles one full tensor from its shards."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = _Reader(folder)
        try:
            metadata = self._reader.read_metadata()
        except OSError as error:
            raise CheckpointError(f"{folder}: not a readable checkpoint: {error}") from error
        self._tensors = {
            name.removeprefix(PREFIX): stored
            for name, stored in metadata.state_dict_metadata.items()
            if name.startswith(PREFIX) and isinstance(stored, TensorStorageMetadata)
        }

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].size)

    def read(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"{self._folder}: holds no tensor {name}")
        stored = self._tensors[name]
        full = torch.empty(stored.size, dtype=stored.properties.dtype)
        with warnings.catch_warnings():
            # Reading in one process is the intent; torch warns whenever it is asked to.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load({PREFIX + name: full}, storage_reader=self._reader, no_dist=True)
        return full


class _Reader(FileSystemReader):
    """Reads the metadata once, not once a tensor."""

    @functools.cached_property
    def _metadata(self) -> Metadata:
        return super().read_metadata()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

"""A whole training state that can be read range by range, wherever it comes from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.errors import CheckpointError
from pipeline.state.manifest import State, TensorEntry


class StateSource(ABC):
    """What a checkpoint of any format holds, in canonical terms."""

    where: str
    """Path or address, for people."""
    step: int
    world_size: int
    writer: Mapping[str, Any]
    """What wrote it, for people."""
    progress: Mapping[str, Any]
    """Fields of `pipeline.artifacts.Progress`."""
    state: State
    tensors: Mapping[str, TensorEntry]
    """By key, `KIND/NAME`."""

    @abstractmethod
    def read(self, key: str, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        """The bytes of elements [start, stop) of the flattened tensor, in order: (first element,
        bytes), each valid until the next is taken. Raises CheckpointError."""

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from element `start` of the flattened tensor on. Raises
        CheckpointError."""
        done = 0
        for _, data in self.read(key, start, start + len(out) // self.entry(key).itemsize):
            out[done : done + len(data)] = data
            done += len(data)
        if done != len(out):
            raise CheckpointError(f"{self.where}: {key} is incomplete")

    def entry(self, key: str) -> TensorEntry:
        """The tensor's dtype and shape. Raises CheckpointError for one that is not there."""
        if key not in self.tensors:
            raise CheckpointError(f"{self.where}: holds no {key}")
        return self.tensors[key]

    @abstractmethod
    def close(self) -> None:
        """Let go of files."""

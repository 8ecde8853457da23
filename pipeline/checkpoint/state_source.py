"""A state seen in another way, without a copy of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipeline.checkpoint.manifest import State, TensorEntry
from pipeline.contracts.engine import WEIGHT
from pipeline.errors import CheckpointError


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


class StateView(StateSource):
    """All of another state. Closing it closes that."""

    def __init__(self, source: StateSource) -> None:
        self._source = source
        self.where = source.where
        self.step = source.step
        self.world_size = source.world_size
        self.writer = source.writer
        self.progress = source.progress
        self.state = source.state
        self.tensors = source.tensors

    def read(self, key: str, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        yield from self._source.read(key, start, stop)

    def close(self) -> None:
        self._source.close()


class Watched(StateView):
    """Tells `report` how many bytes were read, each time some were."""

    def __init__(self, source: StateSource, report: Callable[[int], None]) -> None:
        super().__init__(source)
        self._report = report

    def read(self, key: str, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        for first, data in super().read(key, start, stop):
            yield first, data
            self._report(len(data))


class WeightsOnly(StateView):
    """The weights alone: nothing in it is trained."""

    def __init__(self, source: StateSource) -> None:
        super().__init__(source)
        state = source.state
        self.tensors = {
            key: entry for key, entry in source.tensors.items() if key.startswith(f"{WEIGHT}/")
        }
        self.state = State(
            aliases=state.aliases,
            frozen=[*state.updates, *state.frozen],
            groups=[],
            updates={},
            moments=[],
            loss_scale=None,
        )

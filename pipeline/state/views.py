"""A state seen in another way, without a copy of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipeline.engine import WEIGHT
from pipeline.state.manifest import State
from pipeline.state.source import StateSource


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

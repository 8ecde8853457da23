"""Checkpoints that are derived from others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pipeline import (
    Checkpoints,
    Progress,
    ResourceNeed,
    TrainedRun,
    TrainingLength,
    WrittenCheckpoint,
)


class DerivedCheckpoints(Checkpoints):
    """Everything as in `base`; a subclass changes some of it."""

    def __init__(self, base: Checkpoints) -> None:
        self.base = base

    @property
    def counts_epochs(self) -> bool:
        return self.base.counts_epochs

    def begin(self, length: TrainingLength) -> None:
        self.base.begin(length)

    def poll(self) -> Sequence[WrittenCheckpoint]:
        return self.base.poll()

    def due(self, progress: Progress) -> bool:
        return self.base.due(progress)

    def save(self, progress: Progress) -> None:
        self.base.save(progress)

    def finish(self) -> str:
        return self.base.finish()

    def restore(self, validate: Callable[[Progress], None]) -> Progress | None:
        return self.base.restore(validate)

    def resource_needs(self, length: TrainingLength) -> Iterator[ResourceNeed]:
        return self.base.resource_needs(length)

    def best(self) -> TrainedRun:
        return self.base.best()

    def close(self) -> None:
        self.base.close()

"""The canonical checkpoint: any strategy, any world size resumes what any other saved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from pipeline.contracts.engine import Engine
from pipeline.contracts.model import ModelSource
from pipeline.contracts.stage import Context, PlanView, Trial
from pipeline.contracts.training import Checkpoints
from pipeline.errors import Problem
from stages.checkpoint.settings import CheckpointSettings, unknown_address


@dataclass(frozen=True, kw_only=True)
class ShardedCheckpoint(CheckpointSettings):
    """Save and resume the whole training state, each rank writing its own part of it.

    What one strategy saved on some number of processes, every other resumes on any number. Every
    byte is checksummed, a checkpoint appears whole or not at all, and a damaged one is never used.
    """

    format: ClassVar[str] = "canonical"

    folder: str | None = None
    """Where to keep checkpoints: a path, or an address that fsspec knows (`s3://bucket/folder`), to
    which the run's name is added: a run of the same name goes on from what is there. Default:
    `checkpoints` in the run's folder."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        yield from super().check(plan)
        yield from unknown_address("folder", self.folder)

    def for_benchmark(self, trial: Trial) -> Self:
        """Saves into the run's folder."""
        return replace(super().for_benchmark(trial), folder=None)

    def run(self, ctx: Context, engine: Engine, model: ModelSource | None = None) -> Checkpoints:
        from pipeline.checkpoint.layout import ShardedLayout

        return self.checkpoints(ctx, engine, model, arrangement=ShardedLayout(), folder=self.folder)


@dataclass(frozen=True, kw_only=True)
class FullCheckpoint(CheckpointSettings):
    """Save and resume the whole training state as whole tensors: `model.safetensors`, which other
    tools load as it is, and `optimizer.safetensors`.

    For small models and for handing a training over. All ranks write parts of the same files, so it
    takes a file system; `checkpoint.sharded` is as exact and faster. Either resumes from what the
    other saved.
    """

    format: ClassVar[str] = "full"

    folder: str | None = None
    """Folder to keep checkpoints in, to which the run's name is added. Default: `checkpoints` in
    the run's folder."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        yield from super().check(plan)
        if self.folder is not None and "://" in self.folder:
            yield Problem(
                key="folder",
                message="several processes cannot write into one object",
                hint="use checkpoint.sharded",
            )

    def for_benchmark(self, trial: Trial) -> Self:
        """Saves into the run's folder."""
        return replace(super().for_benchmark(trial), folder=None)

    def run(self, ctx: Context, engine: Engine, model: ModelSource | None = None) -> Checkpoints:
        from pipeline.checkpoint.full_layout import FullLayout

        return self.checkpoints(ctx, engine, model, arrangement=FullLayout(), folder=self.folder)

"""The canonical checkpoint: any strategy, any world size resumes what any other saved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from pipeline.artifacts import Checkpoints, ModelSource
from pipeline.engine import Engine
from pipeline.errors import Problem
from pipeline.stage import Context, PlanView, Trial
from stages.checkpoint.addresses import unknown_address
from stages.checkpoint.settings import CheckpointSettings


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

    def shortened(self, trial: Trial) -> Self:
        """Saves into the run's folder."""
        return replace(super().shortened(trial), folder=None)

    def run(self, ctx: Context, engine: Engine, model: ModelSource | None = None) -> Checkpoints:
        from pipeline.state.planning import Sharded

        return self.checkpoints(ctx, engine, model, arrangement=Sharded(), folder=self.folder)

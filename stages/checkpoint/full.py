"""One consolidated training state in whole tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from pipeline.artifacts import Checkpoints, ModelSource
from pipeline.engine import Engine
from pipeline.errors import Problem
from pipeline.stage import Context, PlanView, Trial
from stages.checkpoint.settings import CheckpointSettings


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

    def shortened(self, trial: Trial) -> Self:
        """Saves into the run's folder."""
        return replace(super().shortened(trial), folder=None)

    def run(self, ctx: Context, engine: Engine, model: ModelSource | None = None) -> Checkpoints:
        from pipeline.state.whole import Whole

        return self.checkpoints(ctx, engine, model, arrangement=Whole(), folder=self.folder)

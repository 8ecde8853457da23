"""The canonical checkpoint: any strategy, any world size resumes what any other saved."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt

from pipeline import (
    Checkpoints,
    Context,
    Engine,
    ModelSource,
    PlanView,
    Problem,
    Progress,
    ResourceNeed,
    TrainedRun,
    TrainingLength,
    WrittenCheckpoint,
)
from pipeline.utils import address_problems, expanded, path_problems
from stages.fields import Period, epoch_problems, mixed_problems

if TYPE_CHECKING:
    from pipeline.checkpoint import Retention


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """When to save, what to keep, and how to begin."""

    format: ClassVar[str]
    """Name of the format of the checkpoints, canonical or full."""

    every: Period | None = None
    """Steps between checkpoints, or a part of an epoch: `0.25 epochs`, `1/3 epochs`. A part of an
    epoch is saved after the step that completes it. Null saves only at the end."""

    keep: Annotated[int, Gt(0)] | None = 2
    """Newest checkpoints to keep; null keeps all."""

    keep_every: Annotated[int, Gt(0)] | None = None
    """Keep for good the checkpoints whose step is a multiple of this."""

    keep_best: Annotated[int, Ge(0)] = 0
    """Number of checkpoints with the lowest held-out loss to keep as well. If it is not 0, one is
    saved after every evaluation with the lowest loss so far, regardless of `every`."""

    asynchronous: bool = True
    """Write while training continues: from a copy of the state on a GPU; state in host memory
    passes through at most 1 GiB per rank, and the next update waits until all but that is in files.
    false makes training wait until the checkpoint is on disk, and passes all state through that."""

    start_from: str | None = None
    """A checkpoint (folder or address), or a run, whose newest it is, to start a new run from;
    ignored once the run has its own."""

    folder: str | None = None
    """Path, or for checkpoint.sharded an address (`s3://bucket/folder`), to which the run's
    name is added: a run of the same name continues from there. null: the run's own folder."""

    @property
    def retention(self) -> Retention:
        """Rules for checkpoints to keep."""
        from pipeline.checkpoint import Retention

        return Retention(last=self.keep, every=self.keep_every, best=self.keep_best)

    def check(self, plan: PlanView) -> Iterator[Problem]:
        yield from address_problems("start_from", self.start_from)
        begin, folder = self.start_from or "", self.folder or ""
        # pathlib raises for a name that is too long
        if begin and "://" not in begin and not os.path.exists(expanded(begin)):  # noqa: PTH110
            message = f"{begin} does not exist here, and a new run needs it"
            yield Problem(key="start_from", message=message, warning=True)
        if str(expanded(folder)).startswith("~"):
            message = f"{folder}: no such user here, whose home this would be in"
            yield Problem(key="folder", message=message)
        yield from mixed_problems(self, plan)
        yield from epoch_problems(plan.readers(self), plan, every=self.every)
        if self.keep_every is not None and isinstance(self.every, str):
            message = f"counts steps, and `every` counts epochs ({self.every}): they rarely meet"
            hint = "give `every` a number of steps too, or keep all: keep: null"
            yield Problem(key="keep_every", message=message, hint=hint)

    def run(self, ctx: Context, engine: Engine, model: ModelSource | None = None) -> Checkpoints:
        from pipeline.checkpoint import FULL, SHARDED, CheckpointManager, address

        return CheckpointManager(
            ctx=ctx,
            engine=engine,
            frozen_base=frozenset(model.frozen_base if model else ()),
            address=address(ctx.run_dir, self.folder, ctx.training),
            file_layout=FULL if self.format == "full" else SHARDED,
            every=self.every,
            retention=self.retention,
            asynchronous=self.asynchronous,
            start_from=self.start_from,
        ).open()

    def run_dry(
        self, ctx: Context, engine: Engine, model: ModelSource | None = None
    ) -> Checkpoints:
        """Checkpoints next to the run's own, which are gone when the dry run ends."""
        from pipeline.checkpoint import CheckpointManager

        # The manager itself, also of a stage that derives another one and wraps its result.
        made = CheckpointSettings.run(replace(self, start_from=None), ctx, engine, model)
        assert isinstance(made, CheckpointManager)
        if ctx.dist.is_main:
            made.discard()  # those that a failed dry run has left
            ctx.on_exit(made.discard)
        ctx.dist.barrier()
        return made


@dataclass(frozen=True, kw_only=True)
class ShardedCheckpoint(CheckpointSettings):
    """Save and resume the whole training state, each rank writing its own part of it.

    A checkpoint of any strategy and number of processes resumes under every other. Every byte is
    checksummed, a checkpoint appears whole or not at all, and a damaged one is never used.
    """

    format: ClassVar[str] = "canonical"

    def check(self, plan: PlanView) -> Iterator[Problem]:
        yield from super().check(plan)
        yield from address_problems("folder", self.folder)


@dataclass(frozen=True, kw_only=True)
class FullCheckpoint(CheckpointSettings):
    """Save and resume the whole training state as whole tensors: `model.safetensors`, which other
    tools load directly, and `optimizer.safetensors`.

    For small models and for handing a training over. All ranks write parts of the same files, so it
    takes a file system; `checkpoint.sharded` is as exact and faster. Either resumes from the
    other's checkpoints.
    """

    format: ClassVar[str] = "full"

    def check(self, plan: PlanView) -> Iterator[Problem]:
        yield from super().check(plan)
        for problem in path_problems("folder", self.folder):
            yield replace(problem, hint="use checkpoint.sharded")


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

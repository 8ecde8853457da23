"""One consolidated training state in two files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from pipeline.artifacts import Checkpoints
from pipeline.engine import Engine
from pipeline.errors import Problem
from pipeline.stage import Context, PlanView


@dataclass(frozen=True, kw_only=True)
class FullCheckpoint:
    """Save and resume the whole training state as whole tensors: `model.safetensors`, which other
    tools load as it is, and `optimizer.safetensors`.

    For small models and for handing a training over. All ranks write parts of the same files, so it
    takes a file system; `checkpoint.sharded` is as exact and faster. Either resumes from what the
    other saved.
    """

    every: Annotated[int, Gt(0)] | None = None
    """Steps between checkpoints; null saves at the end only."""

    keep: Annotated[int, Gt(0)] | None = 2
    """Newest checkpoints to keep; null keeps all."""

    keep_every: Annotated[int, Gt(0)] | None = None
    """Keep for good the checkpoints whose step is a multiple of this."""

    keep_best: Annotated[int, Ge(0)] = 0
    """Keep also so many with the lowest held-out loss (those saved right after an evaluation)."""

    asynchronous: bool = True
    """Write while training goes on, from a copy of the state in host memory; false makes training
    wait until the checkpoint is on disk."""

    folder: str | None = None
    """Folder to keep checkpoints in, to which the run's name is added. Default: `checkpoints` in
    the run's folder."""

    start_from: str | None = None
    """A checkpoint (folder or address) to start a new run from; ignored once the run has its
    own."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        if self.folder is not None and "://" in self.folder:
            yield Problem(
                key="folder",
                message="several processes cannot write into one object",
                hint="use checkpoint.sharded",
            )

    def run(self, ctx: Context, engine: Engine) -> Checkpoints:
        from pipeline.state.checkpoints import StateCheckpoints, address
        from pipeline.state.full import Full
        from pipeline.state.retention import Retention

        return StateCheckpoints(
            ctx,
            engine,
            address=address(ctx.run_dir, self.folder),
            format=Full(),
            every=self.every,
            retention=Retention(last=self.keep, every=self.keep_every, best=self.keep_best),
            asynchronous=self.asynchronous,
            start_from=self.start_from,
        )

"""The canonical checkpoint: any strategy, any world size resumes what any other saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from pipeline.artifacts import Checkpoints
from pipeline.engine import Engine
from pipeline.stage import Context


@dataclass(frozen=True, kw_only=True)
class ShardedCheckpoint:
    """Save and resume the whole training state, each rank writing its own part of it.

    What one strategy saved on some number of processes, every other resumes on any number. Every
    byte is checksummed, a checkpoint appears whole or not at all, and a damaged one is never used.
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
    """Where to keep checkpoints: a path, or an address that fsspec knows (`s3://bucket/folder`), to
    which the run's name is added. Default: `checkpoints` in the run's folder."""

    start_from: str | None = None
    """A checkpoint (folder or address) to start a new run from; ignored once the run has its
    own."""

    def run(self, ctx: Context, engine: Engine) -> Checkpoints:
        from pipeline.state.checkpoints import StateCheckpoints, address
        from pipeline.state.planning import Sharded
        from pipeline.state.retention import Retention

        return StateCheckpoints(
            ctx,
            engine,
            address=address(ctx.run_dir, self.folder),
            format=Sharded(),
            every=self.every,
            retention=Retention(last=self.keep, every=self.keep_every, best=self.keep_best),
            asynchronous=self.asynchronous,
            start_from=self.start_from,
        )

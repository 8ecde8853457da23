"""The canonical checkpoint: any strategy, any world size resumes what any other saved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from pipeline import PlanView, Problem
from pipeline.utils import address_problems, path_problems
from stages.checkpoint.settings import CheckpointSettings


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

"""A finished training instead of a train stage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pipeline import Context, PlanView, Problem, Progress, TrainedRun
from pipeline.utils import address_problems


@dataclass(frozen=True, kw_only=True)
class FinishedTraining:
    """Take an existing checkpoint of any format, to consolidate and export it. `pipe export` writes
    recipes with this stage."""

    nothing_to_plan: ClassVar[bool] = True

    checkpoint: str
    """The checkpoint's folder, or its address (`s3://bucket/run/step-00000100`)."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        yield from address_problems("checkpoint", self.checkpoint)
        if "://" not in self.checkpoint and not Path(self.checkpoint).expanduser().is_dir():
            yield Problem(key="checkpoint", message=f"no such folder: {self.checkpoint}")

    def run(self, ctx: Context) -> TrainedRun:
        from pipeline.checkpoint import Reading, open_state

        address = self.checkpoint
        if "://" not in address:
            address = str(Path(address).expanduser().absolute())
        reading = Reading(weights_only=True, verify=False)
        with contextlib.closing(open_state(address, reading)) as state:
            progress = Progress.from_record(state.progress, address)
        return TrainedRun(checkpoint=address, progress=progress)

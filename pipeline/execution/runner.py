"""Run a plan on this rank: each stage in order, journalled, its artifacts dropped after their last
reader."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pipeline.chain.artifacts import training_of
from pipeline.contracts.stage import Context, Durable
from pipeline.contracts.training import TrainedRun
from pipeline.distributed.heartbeat import Phase
from pipeline.errors import StageError
from pipeline.execution.agreement import require_same_artifact
from pipeline.execution.gpu_records import record_memory, release_memory
from pipeline.execution.journal import Journal
from pipeline.execution.preflight import look_ahead, run_dry
from pipeline.execution.rank_logging import IN_DISPLAY
from pipeline.execution.resume import ResumePlan, digests, plan_resume, restored
from pipeline.utils.packages import collect_as_usual

if TYPE_CHECKING:
    from pipeline.chain.plan import Plan, PlannedSlot


class Runner:
    """One pass over a plan. Every rank makes the same decisions, because rank 0's are shared."""

    def __init__(self, plan: Plan, ctx: Context, journal: Journal) -> None:
        self.plan = plan
        self.ctx = ctx
        self.journal = journal
        self.artifacts: dict[str, Any] = {}
        self._imports = True
        """Whether only declarations have run: what they make is libraries, for the most part."""
        self.digests = digests(plan)

    def run(self) -> None:
        """Run the slots that are left. Raises whatever a stage raises; `ctx.slot` names the stage's
        slot. After a failure live artifacts stay until `close`, so that it can be reported
        first."""
        # only rank 0 may read a journal that is being written
        text = None
        if self.ctx.dist.is_main:
            text = plan_resume(self.plan, self.journal, self.ctx.log).dump()
        todo = ResumePlan.load(self.ctx.dist.broadcast_str(text))
        for planned in self.plan.slots:
            if planned.slot in todo.restore:
                self.artifacts[planned.slot] = restored(planned, todo.restore[planned.slot])
        for number, planned in enumerate(self.plan.slots):
            training = training_of(self.plan.view.wiring, planned.slot)
            self.ctx.slot, self.ctx.training = planned.slot, training
            self.ctx.metrics.training = training  # also of what was made for another slot
            trains = planned.gives is not None and issubclass(planned.gives, TrainedRun)
            if planned.slot in todo.run:
                if trains:
                    left = {later.slot for later in self.plan.slots[number:]}
                    look_ahead(self.plan, self.ctx, self.artifacts, todo.run & left)
                    if self.plan.recipe.dry_run:
                        run_dry(self.plan, self.ctx, self.artifacts)
                self._run_slot(planned)
                if trains:
                    record_memory(self.ctx)
            self._drop_read(planned.slot)
            if trains:
                release_memory(self.ctx)

    def close(self) -> None:
        """Release the artifacts that are left, the newest first."""
        self._drop(reversed(list(self.artifacts)))

    def _run_slot(self, planned: PlannedSlot) -> None:
        self.ctx.dist.heartbeat.beat(Phase.LOAD, step=0)
        self._note("slot started", planned)
        self.ctx.log.info("%s: %s", planned.slot, planned.use, extra=IN_DISPLAY)
        if self._imports and any(planned.inputs.values()):
            collect_as_usual(but_now=True)
            self._imports = False
        began = time.perf_counter()
        record = self._give(planned)
        self.ctx.dist.barrier()
        self._note(
            "slot finished", planned, digest=self.digests[planned.slot], record=record,
            seconds=round(time.perf_counter() - began, 3),
        )  # fmt: skip
        if record is not None and self.ctx.dist.is_main:  # which has written that it is there
            self.ctx.dist.heartbeat.landmark()

    def _give(self, planned: PlannedSlot) -> dict[str, Any] | None:
        """Run the stage and keep what it returns; the record of a durable artifact."""
        inputs = {
            parameter: None if slot is None else self.artifacts[slot]
            for parameter, slot in planned.inputs.items()
        }
        artifact = planned.stage.run(dataclasses.replace(self.ctx), **inputs)
        if planned.gives is not None and not isinstance(artifact, planned.gives):
            raise StageError(
                f"{planned.use} gave {type(artifact).__name__} instead of {planned.gives.__name__}"
            )
        require_same_artifact(artifact, self.ctx)
        if planned.gives is not None:
            self.artifacts[planned.slot] = artifact
        return artifact.record() if isinstance(artifact, Durable) else None

    def _note(self, event: str, planned: PlannedSlot, **facts: Any) -> None:
        if self.ctx.dist.is_main:
            self.journal.write(event, slot=planned.slot, use=planned.use, **facts)

    def _drop_read(self, slot: str) -> None:
        self._drop([held for held in self.artifacts if self.plan.last_reader(held) in (slot, None)])

    def _drop(self, slots: Iterable[str]) -> None:
        """Drop artifacts. Models are full of reference cycles; a durable artifact is an address."""
        live = False
        for slot in slots:
            artifact = self.artifacts.pop(slot)
            live = live or not isinstance(artifact, Durable)
            close = getattr(artifact, "close", None)
            if callable(close):
                close()
            del artifact, close
        if live:
            gc.collect()

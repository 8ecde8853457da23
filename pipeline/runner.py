"""Run a plan on this rank: each stage in order, journalled, its artifacts dropped after their last
reader."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.artifacts import Durable
from pipeline.errors import StageError
from pipeline.journal import Finished, Journal
from pipeline.stage import Context

if TYPE_CHECKING:
    from pipeline.plan import Plan, Step


class Runner:
    """One pass over a plan. Every rank makes the same decisions, because rank 0's are shared."""

    def __init__(self, plan: Plan, ctx: Context, journal: Journal) -> None:
        self.plan = plan
        self.ctx = ctx
        self.journal = journal
        self.artifacts: dict[str, Any] = {}
        self.digests = digests(plan)

    def run(self) -> None:
        """Run what is not done. Raises whatever a stage raises; live artifacts are closed then too."""
        todo = self._decide()
        if not todo:
            self.ctx.log.info("nothing to do: every stage has finished")
        try:
            for step in self.plan.steps:
                if step.slot in todo:
                    self._run_step(step)
                self._drop_read(step.slot)
        finally:
            for slot in list(self.artifacts):
                self._drop(slot)

    def _decide(self) -> set[str]:
        """Slots to run: shared by rank 0, because only it may see a journal that is being written."""
        text = None
        if self.ctx.dist.is_main:
            done = {
                slot: finished.record
                for slot, finished in self.journal.finished().items()
                if self._still_valid(slot, finished)
            }
            text = json.dumps(done)
        done = json.loads(self.ctx.dist.share(text))
        todo = self._todo(set(done))
        for step in self.plan.steps:
            record = done.get(step.slot)
            if step.slot not in todo and record is not None:
                self.artifacts[step.slot] = step.gives.restore(record)
        return todo

    def _still_valid(self, slot: str, finished: Finished) -> bool:
        """A finish counts if the slot and all before it are as they were, and its result is there."""
        step = next((step for step in self.plan.steps if step.slot == slot), None)
        if step is None or finished.digest != self.digests[slot]:
            return False
        if finished.record is None:
            return True
        try:
            step.gives.restore(finished.record)
        except StageError as error:
            self.ctx.log.warning("slot `%s` runs again: %s", slot, error)
            return False
        return True

    def _todo(self, done: set[str]) -> set[str]:
        """Unfinished slots, and finished ones whose result an unfinished one reads and no disk holds."""
        todo: set[str] = set()
        for step in reversed(self.plan.steps):
            if step.slot in done:
                durable = step.gives is None or issubclass(step.gives, Durable)
                readers = (s for s in self.plan.steps if step.slot in s.inputs.values())
                if durable or not any(reader.slot in todo for reader in readers):
                    continue
            todo.add(step.slot)
        return todo

    def _run_step(self, step: Step) -> None:
        ctx = dataclasses.replace(self.ctx, slot=step.slot)
        self.ctx.slot = step.slot
        self._note("slot started", step)
        ctx.log.info("%s: %s", step.slot, step.use)
        began = time.perf_counter()
        inputs = {
            parameter: None if slot is None else self.artifacts[slot]
            for parameter, slot in step.inputs.items()
        }
        artifact = step.stage.run(ctx, **inputs)
        del inputs
        if step.gives is not None and not isinstance(artifact, step.gives):
            raise StageError(
                f"{step.use} gave {type(artifact).__name__} instead of {step.gives.__name__}"
            )
        if artifact is not None:
            self.artifacts[step.slot] = artifact
        record = artifact.record() if isinstance(artifact, Durable) else None
        self.ctx.dist.barrier()
        self._note(
            "slot finished", step, digest=self.digests[step.slot], record=record,
            seconds=round(time.perf_counter() - began, 3),
        )  # fmt: skip

    def _note(self, event: str, step: Step, **facts: Any) -> None:
        if self.ctx.dist.is_main:
            self.journal.write(event, slot=step.slot, use=step.use, **facts)

    def _drop_read(self, slot: str) -> None:
        for held in list(self.artifacts):
            if self.plan.last_reader(held) in (slot, None):
                self._drop(held)

    def _drop(self, slot: str) -> None:
        artifact = self.artifacts.pop(slot)
        close = getattr(artifact, "close", None)
        if callable(close):
            close()
        del artifact, close
        gc.collect()


def digests(plan: Plan) -> dict[str, str]:
    """For each slot a digest over its settings, the seed, and the slots it depends on."""
    found: dict[str, str] = {}
    for step in plan.steps:
        sources = {
            parameter: found[slot] for parameter, slot in step.inputs.items() if slot is not None
        }
        facts: Mapping[str, Any] = {
            "use": step.use,
            "settings": dataclasses.asdict(step.stage),
            "seed": plan.recipe.seed,
            "inputs": sources,
        }
        text = json.dumps(facts, sort_keys=True, default=str)
        found[step.slot] = hashlib.sha256(text.encode()).hexdigest()
    return found

"""The canonical checkpoint as a stage's artifact: snapshot, hand over to the writer, restore."""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from pipeline.checkpoint import location
from pipeline.checkpoint.file_layout import FileLayout
from pipeline.checkpoint.manifest import MANIFEST, Manifest
from pipeline.checkpoint.restore import Restoration, best_run
from pipeline.checkpoint.retention import Retention, expected_count
from pipeline.checkpoint.snapshot import Snapshot
from pipeline.checkpoint.snapshot_buffer import memory_to_take
from pipeline.checkpoint.staging import plan_staging
from pipeline.checkpoint.store import locate, open_store, step_name, step_number
from pipeline.checkpoint.write_plan import plan_writes, without_frozen_base
from pipeline.checkpoint.writer_client import WriterProcess
from pipeline.checkpoint.writer_protocol import SaveRequest, SaveResult, WriterSetup
from pipeline.contracts.engine import Engine
from pipeline.contracts.resources import ResourceNeed, require_resources
from pipeline.contracts.stage import Context
from pipeline.contracts.training import (
    Checkpoints,
    Progress,
    TrainedRun,
    TrainingLength,
    WrittenCheckpoint,
    ends_period,
)
from pipeline.distributed.heartbeat import Phase
from pipeline.errors import CheckpointError, system_errors_as
from pipeline.utils.activities import activity
from pipeline.utils.text import human

CLOSING_SECONDS = 4.0
"""Less than the time that a failed rank is given to release what it holds."""
COST = {"seconds", "ended", "size", "user_seconds", "system_seconds"}
"""Fields of a save's result that tell its cost."""


@dataclass(kw_only=True, eq=False)
class CheckpointManager(Checkpoints):
    """Checkpoints of an engine in a store, written by a process of each rank. The engine waits
    before its state changes, or a save until it may, or, unless `asynchronous`, until all is on
    disk."""

    ctx: Context
    engine: Engine
    frozen_base: Set[str]
    """Tensors that are not saved: the model's source supplies them again."""
    address: str
    file_layout: FileLayout
    every: int | str | None
    """Steps between checkpoints, as `TrainingLength.in_steps` reads them; None: at the end only."""
    retention: Retention
    asynchronous: bool
    start_from: str | None
    _period: Fraction | None = field(default=None, init=False)
    """Steps between checkpoints; None: not known, or at the end only."""
    _attempts: int = field(default=0, init=False)
    _last: str | None = field(default=None, init=False)
    """Name of the newest checkpoint of this process's training."""
    _pending: str | None = field(default=None, init=False)
    """Name of the checkpoint that is being written."""
    _copies: bool = field(default=False, init=False)
    """Whether copies of the newest save may be being made."""
    _written: list[WrittenCheckpoint] = field(default_factory=list, init=False)
    """Checkpoints that came on disk since `written` was asked, on rank 0."""

    def __post_init__(self) -> None:
        """Clean the store, agree with all ranks who writes what, and begin to take memory
        (collective). Raises CheckpointError, and StageError for too little memory."""
        dist = self.ctx.dist
        self.begin(TrainingLength())
        with system_errors_as(CheckpointError), dist.rank0_first() as main:
            self.store = open_store(self.address)
            if main:
                self.store.clean()
        # Prefix of this run's transactions, the same on all ranks.
        self._identity = dist.broadcast_str(uuid.uuid4().hex[:12] if dist.is_main else None)
        location.require_shared(self.store, dist, self._identity)
        plan = plan_writes(self.engine, dist, self.file_layout, without=self.frozen_base)
        # The next update waits for what passes, which is all that need not be copied whole.
        passing = plan.on_host if self.asynchronous else plan.held
        staging = plan_staging(plan.layout, passing)
        what = f"copies of the training state, {human(staging.size)} for each process here"
        memory = staging.size * dist.local_world_size
        require_resources([*self._memory_to_take(), ResourceNeed(what=what, memory=memory)])
        dist.barrier()  # before any rank takes its share
        self.plan = plan
        self.snapshot = Snapshot(self.engine, dist, plan, staging)
        self._writer: WriterProcess | None = None
        self._setup = WriterSetup(
            store=self.address,
            rank=dist.rank,
            world_size=dist.world_size,
            buffer_size=staging.size,
            files=plan.layout.files,
            rounds=staging.rounds,
            template=plan.template if dist.is_main else None,
            retention=self.retention,
        )

    @property
    def writer(self) -> WriterProcess:
        """The process that writes, started behind the first step or, without one, by a save."""
        if self._writer is None:
            self._writer = WriterProcess(self._setup, self.snapshot.buffer)
        return self._writer

    @property
    def counts_epochs(self) -> bool:
        return isinstance(self.every, str)

    def begin(self, length: TrainingLength) -> None:
        self._period = length.in_steps(self.every)

    def resource_needs(self, length: TrainingLength) -> Iterator[ResourceNeed]:
        """Memory for copies that is still being taken, and disk for the expected number of
        checkpoints without the existing ones; at least one."""
        yield from self._memory_to_take()
        if "://" in self.address:
            return
        number = expected_count(self.retention, self.every, length)
        missing = max(number - len(self.store.names()), 1)
        size = sum(file.size for file in self.plan.template.files)
        what = f"{missing} checkpoint{'s' * (missing > 1)}"
        yield ResourceNeed(what=what, disk=missing * size, folder=Path(self.address))

    def _memory_to_take(self) -> Iterator[ResourceNeed]:
        """Memory for copies of the training state that processes here take beside other work."""
        memory = memory_to_take() * self.ctx.dist.local_world_size
        yield ResourceNeed(what="copies of the training state", memory=memory, kept=True)

    def discard(self) -> None:
        """Remove everything at the address, once nothing is being written (rank 0)."""
        with system_errors_as(CheckpointError):
            for name in self.store.names():
                self.store.delete(name)
            self.store.clean()
        if "://" not in self.address:
            shutil.rmtree(self.address, ignore_errors=True)

    def due(self, progress: Progress) -> bool:
        _ = self.writer  # it starts beside the next step, so that no save waits for that
        self.snapshot.check()
        self._settle_pending(wait=False)
        if self.retention.best and progress.best.get("step") == progress.step:
            return True
        if self.counts_epochs and self._period is None:
            raise CheckpointError(
                f"every: the train stage does not say how many steps {self.every} are",
                hint="give the checkpoint slot a number of steps",
            )
        return ends_period(progress.step, self._period)

    def save(self, progress: Progress) -> None:
        name = step_name(progress.step)
        self._settle_pending()
        if name == self._last:
            self._amend(name, progress)
            return
        began = time.monotonic()
        if self._attempts:
            # Rank 0's writer ends last; the next collective must not wait for it.
            self.ctx.dist.barrier()
        self._attempts += 1
        state = without_frozen_base(self.engine, self.frozen_base)
        facts = {"step": progress.step, "progress": vars(progress), "state": state}
        request = SaveRequest(
            name=name,
            identity=f"{self._identity}-{self._attempts}",
            began=began,
            facts=facts if self.ctx.dist.is_main else {},
        )
        beside = self.asynchronous and self.engine.before_change(self._end_copies)
        lasting = {*state.updates, *state.frozen} if beside else None
        self.snapshot.hand_over(self.writer, request, lasting)
        self._pending = self._last = name
        self._copies = True
        if not beside:
            self._end_copies()
        self.ctx.log.debug("snapshot of %s: %.3f s", name, time.monotonic() - began)
        if not self.asynchronous:
            self._settle_pending()
            self.ctx.dist.barrier()

    def _end_copies(self) -> None:
        """Wait until the state of all ranks may change (collective). Raises CheckpointError if
        writing has failed by then."""
        if not self._copies:
            return
        heartbeat = self.ctx.dist.heartbeat
        phase = heartbeat.read().phase
        heartbeat.beat(Phase.SAVE)  # the disk may be slower than a step
        failed = self.snapshot.wait()
        heartbeat.beat(phase)
        self._copies = False
        if failed is not None:
            raise self._failure(failed)
        # Passing waits for this rank's disk, longer perhaps than others wait in a collective of
        # the engine.
        self.ctx.dist.barrier()

    def written(self) -> Sequence[WrittenCheckpoint]:
        self._settle_pending(wait=False)
        written, self._written = self._written, []
        return written

    def _amend(self, name: str, progress: Progress) -> None:
        """Replace the progress of a checkpoint of the same state, if more is known now."""
        if not self.ctx.dist.is_main:
            return
        with system_errors_as(CheckpointError):
            manifest = Manifest.load(self.store.get(name, MANIFEST), self.store.locate(name))
            if progress.differs_from(manifest.progress):
                amended = manifest.model_copy(update={"progress": vars(progress)})
                self.store.put(name, MANIFEST, amended.dump())

    def finish(self) -> str:
        with activity("writing the last checkpoint"):
            self._settle_pending()
            self.ctx.dist.barrier()
        if self._last is None:
            raise CheckpointError("nothing was saved")
        return self.store.locate(self._last)

    def best(self) -> TrainedRun:
        return best_run(self.store, self.ctx.dist)

    def restore(self, validate: Callable[[Progress], None]) -> Progress | None:
        self._settle_pending()
        restoration = Restoration(self.ctx, self.engine, self.store, self.frozen_base)
        progress = restoration.newest(validate)
        if progress is not None:
            self._last = step_name(progress.step)
            return progress
        location.require_none(self.ctx.run_dir, self.address, self.ctx.training)
        if self.start_from is None:
            return None
        store, name = locate(location.agreed_start(self.start_from, self.ctx.dist))
        other = Restoration(self.ctx, self.engine, store, self.frozen_base).named(name, validate)
        return other.as_new_run()

    def close(self) -> None:
        """End the writer, and release the snapshot's memory. After a failure, a save that is being
        written gets a moment to end well: the first rank that is gone ends all."""
        deadline = time.monotonic() + CLOSING_SECONDS
        with contextlib.suppress(CheckpointError, OSError):
            while self._is_unfinished() and time.monotonic() < deadline:
                time.sleep(0.02)
        if self._writer is not None:
            self._writer.close()
        self.snapshot.close()

    def _is_unfinished(self) -> bool:
        """Whether the last save is still being written, by this rank or by another."""
        self._copies = self._copies and not self.snapshot.copied
        self._settle_pending(wait=False)
        if self._pending or self.ctx.dist.is_main or not self._attempts or self._last is None:
            return self._pending is not None
        return self.store.size(self._last, MANIFEST) is None

    def _settle_pending(self, *, wait: bool = True) -> None:
        """Record and log the save that is being written, if it has ended, or with `wait` when it
        has (collective). Raises CheckpointError if it failed."""
        if wait:
            self._end_copies()
        result = None
        if self._pending and not self._copies:
            result = self.writer.wait() if wait else self.writer.poll()
        if result is None:
            return
        if result.problem:
            raise self._failure(result)
        self._pending = None
        for warning in result.warnings:
            self.ctx.log.warning(warning)
        if result.place:
            location.remember(self.ctx.run_dir, self.address, self.ctx.training)
            self.ctx.dist.heartbeat.landmark()
            cost = result.model_dump(include=COST)
            self._written.append(WrittenCheckpoint(step=step_number(result.name) or 0, **cost))
            self.ctx.log.info(
                "saved %s  %.1f MB  %.1f s", result.place, result.size / 1e6, result.seconds
            )

    def _failure(self, result: SaveResult) -> CheckpointError:
        """Record that a save has failed; returns the error to raise."""
        self._pending = self._last = None
        return CheckpointError(
            f"{result.name} could not be saved: {result.problem}",
            hint="earlier checkpoints are unchanged",
        )

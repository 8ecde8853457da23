"""The canonical checkpoint as a stage's artifact: snapshots, the writer, restores."""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Self

from pipeline.checkpoint import location
from pipeline.checkpoint.file_layout import FileLayout, plan_staging
from pipeline.checkpoint.location import Retention, best_of, expected_count
from pipeline.checkpoint.manifest import MANIFEST, Manifest
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.checkpoint.restore import Restoration
from pipeline.checkpoint.snapshot import Snapshot, memory_need
from pipeline.checkpoint.store import step_name, step_number
from pipeline.checkpoint.write_plan import plan_writes, without_frozen_base
from pipeline.checkpoint.writer import SaveRequest, SaveResult, WriterProcess, WriterSetup
from pipeline.contracts.engine import Engine
from pipeline.contracts.stage import Context, ResourceNeed, require_resources
from pipeline.contracts.training import (
    Checkpoints,
    Progress,
    TrainedRun,
    TrainingLength,
    WrittenCheckpoint,
    ends_period,
)
from pipeline.distributed.heartbeat import Phase
from pipeline.errors import CheckpointError, UsageError, in_words, system_errors_as
from pipeline.utils.activities import activity
from pipeline.utils.text import human, plural

CLOSING_SECONDS = 4.0
"""Less than the time that a failed rank is given to release what it holds."""
COST = {"seconds", "ended", "size", "user_seconds", "system_seconds"}
"""Fields of a save's result that tell its cost."""


@dataclass(kw_only=True, eq=False)
class CheckpointManager(Checkpoints):
    """Checkpoints of an engine in a store, written by a process of each rank; `open` comes before
    anything else. What waits for a save:

    - background: the engine, before its state changes, until the copies are made
    - foreground, where an engine cannot wait: `save`, as long
    - not `asynchronous`: `save`, until everything is on disk"""

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
    _writer: WriterProcess | None = field(default=None, init=False)
    _attempts: int = field(default=0, init=False)
    _last_begun: str | None = field(default=None, init=False)
    """Name of the newest save that has begun, or of the checkpoint that was restored."""
    _pending: str | None = field(default=None, init=False)
    """Name of the checkpoint that is being written."""
    _copying: bool = field(default=False, init=False)
    """Whether copies of the newest save may be being made."""
    _written: list[WrittenCheckpoint] = field(default_factory=list, init=False)
    """Checkpoints that came on disk since the last `poll`, on rank 0."""

    def open(self) -> Self:
        """Clean the store, agree with all ranks who writes what, and begin to allocate memory
        (collective). Raises CheckpointError, and StageError for too little memory."""
        dist = self.ctx.dist
        self.begin(TrainingLength())  # for a train stage that never calls it: `every` may be steps
        with system_errors_as(CheckpointError), dist.rank0_first() as main:
            self.store = location.open_store(self.address)
            if main:
                self.store.clean()
        # Prefix of this run's transactions, the same on all ranks.
        self._identity = dist.broadcast_str(uuid.uuid4().hex[:12] if dist.is_main else None)
        with system_errors_as(CheckpointError):
            trial = self.store.begin(step_name(0), self._identity)
            if dist.is_main:
                self.store.put(*trial.at("seen"), b"")
        dist.barrier()
        with system_errors_as(CheckpointError):
            sees = self.store.size(*trial.at("seen")) is not None
        seen = dist.gather(sees)  # whether each rank sees what rank 0 writes
        self.store.abandon(trial)
        if not all(seen):
            place = self.store.locate("")
            raise CheckpointError(
                f"rank {seen.index(False)} does not see what rank 0 writes to {place}",
                hint="checkpoints must be on a file system that all nodes share",
            )
        self.plan = plan_writes(self.engine, dist, self.file_layout, without=self.frozen_base)
        # The next update waits for what is streamed: all that need not be copied whole.
        streamed = self.plan.on_host if self.asynchronous else self.plan.own_keys
        self.staging = plan_staging(self.plan.rank_files, streamed)
        size = self.staging.size
        what = f"copies of the training state, {human(size)} for each process here"
        memory = size * dist.local_world_size
        require_resources([memory_need(dist), ResourceNeed(what=what, memory=memory)])
        dist.barrier()  # before any rank allocates its share
        self.snapshot = Snapshot(self.engine, dist, self.plan, self.staging)
        return self

    def start_writer(self) -> WriterProcess:
        """The process that writes; it is started once, by the first call."""
        if self._writer is None:
            dist, plan = self.ctx.dist, self.plan
            setup = WriterSetup(
                store=self.address, rank=dist.rank, world_size=dist.world_size,
                buffer_size=self.staging.size, rounds=self.staging.rounds,
                files=plan.rank_files.files, shared=plan.rank_files.shared,
                template=plan.template if dist.is_main else None, retention=self.retention,
            )  # fmt: skip
            self._writer = WriterProcess(setup, self.snapshot.buffer.descriptor)
        return self._writer

    @property
    def counts_epochs(self) -> bool:
        return isinstance(self.every, str)

    def begin(self, length: TrainingLength) -> None:
        self._period = length.in_steps(self.every)

    def resource_needs(self, length: TrainingLength) -> Iterator[ResourceNeed]:
        """Memory that is still being allocated, and disk for the checkpoints to come."""
        yield memory_need(self.ctx.dist)
        if "://" in self.address:
            return
        number = expected_count(self.retention, self.every, length)
        missing = max(number - len(self.store.names()), 1)
        size = sum(file.size for file in self.plan.template.files)
        what = plural(missing, "checkpoint")
        yield ResourceNeed(what=what, disk=missing * size, folder=Path(self.address))

    def discard(self) -> None:
        """Remove everything at the address, once nothing is being written (rank 0)."""
        with system_errors_as(CheckpointError):
            for name in self.store.names():
                self.store.delete(name)
            self.store.clean()
        if "://" not in self.address:
            shutil.rmtree(self.address, ignore_errors=True)

    def poll(self) -> Sequence[WrittenCheckpoint]:
        # The first call comes after step 1: the writer must be made by the main thread, and must
        # not slow step 1.
        self.start_writer()
        if self.snapshot.filled.done():
            self.snapshot.filled.result()  # raises what has kept the memory from being allocated
        self._reap(wait=False)
        written, self._written = self._written, []
        return written

    def due(self, progress: Progress) -> bool:
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
        self._reap()
        if name == self._last_begun:  # the state is the same, but more may be known now
            with system_errors_as(CheckpointError):
                if self.ctx.dist.is_main:
                    data = self.store.get(name, MANIFEST)
                    manifest = Manifest.load(data, self.store.locate(name))
                    if progress.differs_from(manifest.progress):
                        manifest = manifest.model_copy(update={"progress": vars(progress)})
                        self.store.put(name, MANIFEST, manifest.dump())
            return
        began = time.monotonic()
        if self._attempts:
            # Rank 0 is here only after its writer's commit. This barrier has no timeout; the
            # engine's next collective has one.
            self.ctx.dist.barrier()
        self._attempts += 1
        state = without_frozen_base(self.engine, self.frozen_base)
        facts = {"step": progress.step, "progress": vars(progress), "state": state}
        request = SaveRequest(
            name=name, identity=f"{self._identity}-{self._attempts}", began=began,
            facts=facts if self.ctx.dist.is_main else {},
        )  # fmt: skip
        in_background = self.asynchronous and self.engine.before_change(self._end_copies)
        stable = {*state.updates, *state.frozen} if in_background else None
        self.snapshot.start(self.start_writer(), request, stable)
        self._pending = self._last_begun = name
        self._copying = True
        if not in_background:
            self._end_copies()
        self.ctx.log.debug("snapshot of %s: %.3f s", name, time.monotonic() - began)
        if not self.asynchronous:
            self._reap()
            self.ctx.dist.barrier()

    def _end_copies(self) -> None:
        """Wait until the state of all ranks may change (collective). Raises CheckpointError if
        writing has failed by then."""
        if not self._copying:
            return
        heartbeat = self.ctx.dist.heartbeat
        phase = heartbeat.read().phase
        heartbeat.beat(Phase.SAVE)  # the disk may be slower than a step
        failed = self.snapshot.copied.result()
        heartbeat.beat(phase)
        self._copying = False
        if failed is not None:
            self._require_saved(failed)
        # Streaming waits for this rank's disk, longer perhaps than others wait in a collective of
        # the engine.
        self.ctx.dist.barrier()

    def finish(self) -> str:
        with activity("writing the last checkpoint"):
            self._reap()
            self.ctx.dist.barrier()
        if self._last_begun is None:
            raise CheckpointError("nothing was saved")
        return self.store.locate(self._last_begun)

    def best(self) -> TrainedRun:
        found = None
        if self.ctx.dist.is_main:
            with system_errors_as(CheckpointError):
                found = next(iter(best_of(self.store, self.store.names(), 1)), "")
        name = self.ctx.dist.broadcast_str(found)
        if not name:
            raise CheckpointError(f"no checkpoint in {self.store.locate('')} has a held-out loss")
        place = self.store.locate(name)
        progress = Progress.from_record(CheckpointReader(self.store, name).progress, place)
        return TrainedRun(checkpoint=place, progress=progress)

    def restore(self, validate: Callable[[Progress], None]) -> Progress | None:
        if self._pending:
            self._reap()
        restoration = Restoration(self.ctx, self.engine, self.store, self.frozen_base)
        progress = restoration.newest(validate)
        if progress is not None:
            self._last_begun = step_name(progress.step)
            return progress
        location.require_never_saved(self.ctx.run_dir, self.address, self.ctx.training)
        if self.start_from is None:
            return None
        start = None
        if self.ctx.dist.is_main:
            try:
                store, name = location.find(self.start_from)
                start = store.locate(name or store.names()[-1])
            except (UsageError, OSError) as error:
                raise CheckpointError(f"start_from: {in_words(error)}") from error
        store, name = location.open_checkpoint(self.ctx.dist.broadcast_str(start))
        restoration = Restoration(self.ctx, self.engine, store, self.frozen_base)
        progress = restoration.load(name, validate)
        self.ctx.dist.barrier()
        self.engine.sync_compute_weights()
        self.ctx.log.info("started from %s", store.locate(name))
        return progress.as_new_run()

    def close(self) -> None:
        """End the writer, and release the snapshot's memory. After a failure, a save that is being
        written gets a moment to end well: the first rank that is gone ends all."""
        deadline = time.monotonic() + CLOSING_SECONDS
        with contextlib.suppress(CheckpointError, OSError):
            while time.monotonic() < deadline:
                self._copying = self._copying and not self.snapshot.copied.done()
                self._reap(wait=False)
                # What rank 0's writer commits is this rank's save too.
                others = None if self.ctx.dist.is_main or not self._attempts else self._last_begun
                is_there = others is None or self.store.size(others, MANIFEST) is not None
                if is_there and not self._pending:
                    break
                time.sleep(0.02)
        if self._writer is not None:
            self._writer.close()
        self.snapshot.close()

    def _reap(self, *, wait: bool = True) -> None:
        """Record and log the save that is being written, if it has ended, or with `wait` when it
        has (collective). Raises CheckpointError if it failed."""
        if wait and self._copying:
            self._end_copies()
        result = None
        if self._writer is not None and self._pending and not self._copying:
            result = self._writer.wait() if wait else self._writer.poll()
        if result is None:
            return
        self._require_saved(result)
        self._pending = None
        for warning in result.warnings:
            self.ctx.log.warning(warning)
        if result.address:
            location.remember(self.ctx.run_dir, self.address, self.ctx.training)
            self.ctx.dist.heartbeat.landmark()
            cost = result.model_dump(include=COST)
            self._written.append(WrittenCheckpoint(step=step_number(result.name) or 0, **cost))
            self.ctx.log.info(
                "saved %s  %.1f MB  %.1f s", result.address, result.size / 1e6, result.seconds
            )

    def _require_saved(self, result: SaveResult) -> None:
        """Raise CheckpointError for a save that has failed, and forget it."""
        if not result.problem:
            return
        self._pending = self._last_begun = None
        raise CheckpointError(
            f"{result.name} could not be saved: {result.problem}",
            hint="earlier checkpoints are unchanged",
        )

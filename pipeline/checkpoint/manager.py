"""The canonical checkpoint as a stage's artifact: snapshot, hand over to the writer, restore."""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any

from pipeline.checkpoint import location, summary
from pipeline.checkpoint.layout import FileLayout, plan_writes
from pipeline.checkpoint.location import require_shared
from pipeline.checkpoint.manifest import FILE, Group, Manifest, Scale, State
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.checkpoint.restore import Restoration, own_state, saved_progress
from pipeline.checkpoint.retention import Retention, best_of, count, room
from pipeline.checkpoint.staging import Staging, stage
from pipeline.checkpoint.store import locate, open_store, step_name
from pipeline.checkpoint.writer_client import Snapshot, WriterProcess
from pipeline.checkpoint.writer_main import ManifestTemplate, SaveRequest, SaveResult, Setup
from pipeline.contracts.engine import Engine, EngineState
from pipeline.contracts.resources import require_resources
from pipeline.contracts.stage import Context, ResourceNeed
from pipeline.contracts.training import Checkpoints, Progress, TrainedRun, TrainingLength
from pipeline.errors import CheckpointError, UsageError, in_words, system_errors_as
from pipeline.utils.text import human
from pipeline.utils.versions import versions

CLOSING_SECONDS = 4.0
"""Less than a failed rank is given to release what it holds."""


class CheckpointManager(Checkpoints):
    """Checkpoints of an engine in a store, written by a process of each rank. The loop waits until
    its state may change (`staging.py`), or, unless `asynchronous`, until all is on disk. `every`
    counts steps; None means only at the end. Tensors that are `frozen_base` from the model's source
    are left out."""

    def __init__(
        self,
        ctx: Context,
        engine: Engine,
        *,
        frozen_base: Set[str] = frozenset(),
        address: str,
        arrangement: FileLayout,
        every: int | None,
        retention: Retention,
        asynchronous: bool,
        start_from: str | None = None,
    ) -> None:
        self._ctx = ctx
        self._engine = engine
        self._borrowed = frozen_base
        self._every = every
        self._retention = retention
        self._asynchronous = asynchronous
        self._start_from = start_from
        self.address = address
        self._last: str | None = None
        self._pending: str | None = None
        with system_errors_as(CheckpointError), ctx.dist.rank0_first() as main:
            self._store = open_store(address)
            if main:
                self._store.clean()
        self._identity = ctx.dist.broadcast_str(uuid.uuid4().hex[:12] if ctx.dist.is_main else None)
        require_shared(self._store, ctx.dist, self._identity)
        self._attempts = 0
        self._writer_facts = {"engine": dict(engine.describe()), "packages": versions()}
        self._plan = plan_writes(engine, ctx.dist, arrangement, without=frozen_base)
        self._staging = self._staged(asynchronous)
        _require_memory(ctx, self._staging.size)
        self._snapshot = Snapshot(engine, ctx.dist, self._plan, self._staging)
        self._writer = WriterProcess(self._setup(address, retention), self._snapshot.arena)

    @property
    def snapshot_bytes(self) -> int:
        """Host memory that this rank's share of a checkpoint takes on its way to the disk."""
        return self._staging.size

    @property
    def size(self) -> int:
        """Bytes of a checkpoint, on rank 0."""
        return sum(file.size for file in self._plan.files)

    def resource_needs(self, length: TrainingLength) -> Iterator[ResourceNeed]:
        """Disk for as many as there will be at once, less those that are there."""
        if "://" in self.address:
            return
        number = count(self._retention, self._every, length).number
        yield room(number, len(self._store.names()), self.size, Path(self.address))

    def discard(self) -> None:
        """Remove everything at the address, once nothing is being written (rank 0)."""
        with system_errors_as(CheckpointError):
            for name in self._store.names():
                self._store.delete(name)
            self._store.clean()
        if "://" not in self.address:
            shutil.rmtree(self.address, ignore_errors=True)

    def due(self, progress: Progress) -> bool:
        self._settle_if_done()
        if self._retention.best and progress.best.get("step") == progress.step:
            return True
        return self._every is not None and progress.step > 0 and progress.step % self._every == 0

    def save(self, progress: Progress) -> None:
        name = step_name(progress.step)
        if name == self._last:
            self._amend(name, progress)
            return
        began = time.perf_counter()
        self._settle_pending()
        if self._attempts:
            # Rank 0's writer ends last; the next collective must not wait for it.
            self._ctx.dist.barrier()
        self._attempts += 1
        facts = self._facts(progress) if self._ctx.dist.is_main else {}
        identity = f"{self._identity}-{self._attempts}"
        job = SaveRequest(name=name, identity=identity, facts=facts)
        failed = self._snapshot.hand_over(self._writer, job)
        if failed is not None:
            self._settle(failed)
        self._pending = self._last = name
        self._ctx.dist.barrier()  # a disk may be slower than the next collective waits
        self._ctx.log.debug("snapshot of %s: %.3f s", name, time.perf_counter() - began)
        if not self._asynchronous:
            self._settle_pending()
            self._ctx.dist.barrier()

    def _amend(self, name: str, progress: Progress) -> None:
        """Let a checkpoint have what is known by now of the state that it holds."""
        self._settle_pending()
        if not self._ctx.dist.is_main:
            return
        with system_errors_as(CheckpointError):
            manifest = Manifest.load(self._store.get(name, FILE), self._store.locate(name))
            if progress.differs_from(manifest.progress):
                amended = manifest.model_copy(update={"progress": vars(progress)})
                self._store.replace(name, FILE, amended.dump())

    def finish(self) -> str:
        self._settle_pending()
        self._ctx.dist.barrier()
        if self._last is None:
            raise CheckpointError("nothing was saved")
        return self._store.locate(self._last)

    def best(self) -> TrainedRun:
        found = None
        if self._ctx.dist.is_main:
            found = "".join(best_of(self._store, self._store.names(), 1))
        name = self._ctx.dist.broadcast_str(found)
        if not name:
            raise CheckpointError(f"no checkpoint in {self.address} has a held-out loss")
        with contextlib.closing(CheckpointReader(self._store, name)) as reader:
            progress = saved_progress(reader)
        return TrainedRun(checkpoint=self._store.locate(name), progress=progress)

    def restore(self, validate: Callable[[Progress], None]) -> Progress | None:
        self._settle_pending()
        progress = Restoration(self._ctx, self._engine, self._store, self._borrowed).newest(
            validate
        )
        if progress is not None:
            self._last = step_name(progress.step)
            return progress
        location.require_none(self._ctx.run_dir, self.address)
        if self._start_from is None:
            return None
        store, name = locate(self._agreed_start(self._start_from))
        other = Restoration(self._ctx, self._engine, store, self._borrowed).named(name, validate)
        return other.as_new_run()

    def close(self) -> None:
        """End the writer, and give the snapshot's memory back. After a failure, a save that is
        being written gets a moment to end well: the first rank that is gone ends all."""
        deadline = time.monotonic() + CLOSING_SECONDS
        with contextlib.suppress(CheckpointError, OSError):
            while self._is_unfinished() and time.monotonic() < deadline:
                time.sleep(0.02)
        self._writer.close()
        self._snapshot.close()

    def _agreed_start(self, address: str) -> str:
        """The checkpoint that `start_from` means, as rank 0 finds it."""
        found = None
        if self._ctx.dist.is_main:
            try:
                store, name = summary.find(address, location.RECIPE)
                found = store.locate(name or store.names()[-1])
            except (UsageError, OSError) as error:
                raise CheckpointError(f"start_from: {in_words(error)}") from error
        return self._ctx.dist.broadcast_str(found)

    def _setup(self, address: str, retention: Retention) -> Setup:
        plan, rank = self._plan, self._ctx.dist.rank
        world = self._ctx.dist.world_size
        skeleton = ManifestTemplate(
            tensors=plan.tensors,
            runs=plan.runs,
            files=plan.files,
            sums=[sums_name(rank) for rank in range(world)],
            retention=retention,
        )
        return Setup(
            store=address,
            rank=rank,
            size=self._staging.size,
            files=plan.layout.files,
            rounds=self._staging.rounds,
            sums=sums_name(rank),
            skeleton=skeleton if self._ctx.dist.is_main else None,
        )

    def _staged(self, asynchronous: bool) -> Staging:
        """Training waits for what passes, which is all that it need not copy whole to go on."""
        passing = set(self._plan.on_host if asynchronous else self._plan.held)
        tensors = {entry.key: entry for entry in self._plan.tensors}
        return stage(self._plan.layout, tensors, passing.__contains__)

    def _facts(self, progress: Progress) -> dict[str, Any]:
        return {
            "step": progress.step,
            "world_size": self._ctx.dist.world_size,
            "writer": self._writer_facts,
            "progress": vars(progress),
            "state": stored_state(own_state(self._engine, self._borrowed)),
        }

    def _is_unfinished(self) -> bool:
        """Whether the last save is still being written, by this rank or by another."""
        self._settle_if_done()
        if self._pending or self._ctx.dist.is_main or not self._attempts or self._last is None:
            return self._pending is not None
        return self._store.size(self._last, FILE) is None

    def _settle_if_done(self) -> None:
        outcome = self._writer.poll() if self._pending else None
        if outcome is not None:
            self._settle(outcome)

    def _settle_pending(self) -> None:
        if self._pending:
            self._settle(self._writer.wait())

    def _settle(self, outcome: SaveResult) -> None:
        """Take note of how a save ended. Raises CheckpointError if it failed."""
        self._pending = None
        if outcome.problem:
            self._last = None
            raise CheckpointError(
                f"{outcome.name} could not be saved: {outcome.problem}",
                hint="what was saved before is untouched",
            )
        for warning in outcome.warnings:
            self._ctx.log.warning(warning)
        if outcome.place:
            location.remember(self._ctx.run_dir, self.address)
            self._ctx.log.info(
                "saved %s  %.1f MB  %.1f s", outcome.place, outcome.size / 1e6, outcome.seconds
            )


def _require_memory(ctx: Context, size: int) -> None:
    """ResourceNeed for the arenas of all ranks of this machine, before any of them is made."""
    require_resources(
        [
            ResourceNeed(
                what=f"copies of the training state, {human(size)} for each process here",
                memory=size * ctx.dist.local_world_size,
            )
        ]
    )
    ctx.dist.barrier()


def address(run_dir: Path, folder: str | None) -> str:
    """Where a run's checkpoints are, given what its recipe says."""
    if folder is None:
        return location.default(run_dir)
    if "://" in folder:
        return f"{folder.rstrip('/')}/{run_dir.name}"
    return str(Path(folder).expanduser().absolute() / run_dir.name)


def sums_name(rank: int) -> str:
    """File of a rank's checksums."""
    return f"rank-{rank:05d}.sums"


def stored_state(state: EngineState) -> State:
    """An engine's state as a manifest has it."""
    scale = state.loss_scale
    return State(
        aliases=dict(state.aliases),
        frozen=list(state.frozen),
        groups=[
            Group(settings=dict(group.settings), parameters=list(group.parameters))
            for group in state.groups
        ],
        updates=dict(state.updates),
        moments=list(state.moments),
        loss_scale=None if scale is None else Scale(scale=scale.scale, good_steps=scale.good_steps),
        averages=list(state.averages),
    )

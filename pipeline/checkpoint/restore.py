"""Bring an engine to the state of the newest checkpoint that verifies, on all ranks together."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence, Set

import torch
from torch import Tensor

from pipeline.checkpoint import rng_state
from pipeline.checkpoint.manifest import MANIFEST, Damaged
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.checkpoint.retention import best_of
from pipeline.checkpoint.store import Store
from pipeline.checkpoint.write_plan import (
    DTYPES,
    random_key,
    saved_streams,
    tile_of,
    without_frozen_base,
)
from pipeline.contracts.engine import Engine, EngineState, Fragment
from pipeline.contracts.precision import dtype_name
from pipeline.contracts.stage import Context
from pipeline.contracts.training import Progress, TrainedRun
from pipeline.distributed.process_group import DistContext
from pipeline.errors import CheckpointError, ResumeRefused, system_errors_as
from pipeline.utils.activities import activity

LISTED = 5
"""Names that a message lists at most."""


class Restoration:
    """One try to continue from the content of a store."""

    def __init__(
        self, ctx: Context, engine: Engine, store: Store, frozen_base: Set[str] = frozenset()
    ) -> None:
        self._ctx = ctx
        self._engine = engine
        self._store = store
        self._frozen_base = frozen_base
        self.bytes_read = 0
        """Bytes of tensors that this rank read."""

    def named(self, name: str, validate: Callable[[Progress], None]) -> Progress:
        """Load this checkpoint. Raises CheckpointError, and moves nothing, if that fails."""
        self._require_same(name)
        progress = self._load(name, validate)
        self._ctx.dist.barrier()
        self._engine.sync_compute_weights()
        self._ctx.log.info("started from %s", self._store.locate(name))
        return progress

    def newest(self, validate: Callable[[Progress], None]) -> Progress | None:
        """Load the newest checkpoint that verifies; None if none exists. `validate` may refuse a
        progress before anything is loaded. A damaged checkpoint goes into quarantine, and all ranks
        take the one before it. Raises CheckpointError if all are damaged, or if one is of another
        model, and StageError on ranks that see different ones."""
        damage = ""
        while True:
            own = json.dumps(self._quarantine_until_whole()) if self._ctx.dist.is_main else None
            name, found = json.loads(self._ctx.dist.broadcast_str(own))
            damage = found or damage
            if not name:
                break
            self._require_same(name)
            progress, problem = None, None
            try:
                with activity(f"reading {name}"):
                    progress = self._load(name, validate)
            except Damaged as error:
                problem = str(error), error.key
            problems = self._ctx.dist.gather(problem)
            if not any(problems):
                self._engine.sync_compute_weights()
                self._ctx.log.info("restored %s", self._store.locate(name))
                return progress
            damage = self._require_confirmed(name, problems)
            if self._ctx.dist.is_main:
                self._quarantine(name, damage)
        if damage:
            raise CheckpointError(
                f"no checkpoint can be used: {damage}",
                hint="they were renamed, not deleted; to train from the start, start a new run",
            )
        return None

    def _require_same(self, name: str) -> None:
        """Raise StageError on every rank unless all see the same manifest, which holds the sums of
        all that is read (collective): nodes with disks of their own may hold different ones."""
        manifest = b""
        with system_errors_as(CheckpointError), contextlib.suppress(FileNotFoundError):
            manifest = self._store.get(name, MANIFEST)
        facts = {"manifest": hashlib.sha256(manifest).hexdigest()}
        self._ctx.dist.require_same(f"checkpoint {self._store.locate(name)}", facts)

    def _require_confirmed(self, name: str, problems: Sequence[Sequence[str] | None]) -> str:
        """The first of the ranks' problems (in words, and the tensor's key if it is known). Raises
        CheckpointError on every rank unless rank 0 cannot read the tensors either: else the fault
        is that rank's machine, not the file."""
        rank, text = next((rank, found[0]) for rank, found in enumerate(problems) if found)
        confirmed = None
        if self._ctx.dist.is_main:
            keys = {found[1] for found in problems if found}
            confirmed = json.dumps(self._is_damaged(name, keys))
        if not json.loads(self._ctx.dist.broadcast_str(confirmed)):
            raise CheckpointError(
                f"rank {rank} cannot read what rank 0 reads well: {text}",
                hint="look at that rank's machine and its way to the disk; "
                "the checkpoint was not changed",
            )
        return text

    def _is_damaged(self, name: str, keys: Set[str]) -> bool:
        try:
            reader = CheckpointReader(self._store, name)
            reader.require_headers()
            for key in keys - {""}:
                for _ in reader.read(key, 0, reader.tensors[key].numel):
                    pass
        except Damaged:
            return True
        return False

    def _quarantine_until_whole(self) -> tuple[str, str]:
        """The newest checkpoint whose manifest and files are whole (empty: none), and in words
        which one was damaged."""
        damage = ""
        with system_errors_as(CheckpointError):
            for name in reversed(self._store.names()):
                try:
                    CheckpointReader(self._store, name).require_files()
                except Damaged as error:
                    damage = str(error)
                    self._quarantine(name, damage)
                else:
                    return name, damage
            # Damage that an earlier resume has found is no reason to start from scratch either.
            earlier = [f"{place}: damaged" for place in self._store.quarantined()]
        return "", damage or "".join(earlier[-1:])

    def _quarantine(self, name: str, why: str) -> None:
        aside = self._store.quarantine(name)
        self._ctx.log.warning("%s; not used, kept as %s", why, aside)

    def _load(self, name: str, validate: Callable[[Progress], None]) -> Progress:
        reader = CheckpointReader(self._store, name)
        progress = saved_progress(reader)
        validate(progress)
        live = without_frozen_base(self._engine, self._frozen_base)
        saved = dataclasses.replace(reader.state, shapes=reader.manifest.shapes())
        require_same_model(saved, live, reader.where, self._frozen_base)
        for fragment in self._engine.restore(saved):
            self._ctx.dist.heartbeat.beat()
            for kind, tensor in fragment.state.items():
                if fragment.name not in self._frozen_base:
                    self._fill(reader, fragment, kind, tensor)
        # The streams of random numbers continue; new ones start where another number of them is
        # needed, or some are missing.
        stream, streams = self._engine.random_stream, self._engine.random_streams
        rng_state.reseed(self._ctx.seed, progress.step, stream, streams)
        if saved_streams(reader.tensors) == set(range(streams)):
            keys = {name: random_key(stream, name) for name in rng_state.NAMES}
            states = {n: reader.read_bytes(key) for n, key in keys.items() if key in reader.tensors}
            rng_state.apply(states, self._ctx.dist.device)
        self.bytes_read += reader.bytes_read
        return progress

    def _fill(self, reader: CheckpointReader, fragment: Fragment, kind: str, live: Tensor) -> None:
        key = f"{kind}/{fragment.name}"
        entry = reader.entry(key)
        stored = DTYPES[entry.dtype]
        trained = fragment.name in reader.state.updates
        narrows = trained and torch.promote_types(stored, live.dtype) != live.dtype
        if narrows and "precision" not in self._ctx.accept:
            raise ResumeRefused(
                f"{reader.where}: {key} is {dtype_name(stored)}, this recipe trains "
                f"{dtype_name(live.dtype)}: loading it loses precision",
                hint="keep master weights as they were, or pipe resume --accept precision",
            )
        for (rows, run, here, pitch, there, step), data in reader.read_tile(key, tile_of(fragment)):
            value = torch.frombuffer(data, dtype=stored).as_strided((rows, run), (pitch, 1), here)
            first = live.storage_offset() + there
            target = live.as_strided((rows, run), (step, 1), first)
            # An untrained tensor that was stored rounded is here already, unrounded.
            if trained or not torch.equal(target.to("cpu", stored), value):
                target.copy_(value)


def saved_progress(reader: CheckpointReader) -> Progress:
    """Progress of the training that saved it. Raises CheckpointError for unknown fields."""
    try:
        return Progress.from_record(reader.progress)
    except TypeError as error:
        raise CheckpointError(f"{reader.where}: written by another version: {error}") from error


def best_run(store: Store, dist: DistContext) -> TrainedRun:
    """The checkpoint with the lowest held-out loss, as rank 0 finds it. Raises CheckpointError
    where none has one."""
    found = None
    if dist.is_main:
        with system_errors_as(CheckpointError):
            found = next(iter(best_of(store, store.names(), 1)), "")
    name = dist.broadcast_str(found)
    if not name:
        raise CheckpointError(f"no checkpoint in {store.locate('')} has a held-out loss")
    progress = saved_progress(CheckpointReader(store, name))
    return TrainedRun(checkpoint=store.locate(name), progress=progress)


def require_same_model(
    saved: EngineState, live: EngineState, where: str, frozen_base: Set[str] = frozenset()
) -> None:
    """Raise ResumeRefused, listing the differences, unless names, shapes, trained parameters and
    kinds of optimizer state agree. `frozen_base` is not part of `live`."""
    if live.updates and not saved.updates:
        raise ResumeRefused(
            f"{where} holds weights without an optimizer's state", hint="load them as a model"
        )
    differences = list(_differences(saved, live, frozen_base))
    if differences:
        held, here = saved.shapes.keys(), live.shapes.keys()
        frozen = held != here and held <= here | frozen_base
        raise ResumeRefused(
            f"{where} is of another model or optimizer: {_list(differences)}",
            hint="frozen weights are not in checkpoints: to freeze others, start a new run from "
            "this run's export"
            if frozen
            else "",
        )


def _differences(saved: EngineState, live: EngineState, frozen_base: Set[str]) -> Iterator[str]:
    """Differences in words; tensors without elements may be missing."""
    missing = [name for name in live.shapes if name not in saved.shapes]
    yield from (f"{name} is missing" for name in missing if 0 not in live.shapes[name])
    for name in saved.shapes:
        if name in frozen_base and name in saved.updates:
            yield f"{name} was trained, here it is frozen"
        elif name not in live.shapes:
            yield f"{name} is not in this model"
    common = [name for name in live.shapes if name in saved.shapes]
    for name in common:
        before, now = (list(state.shapes[name]) for state in (saved, live))
        if before != now:
            yield f"{name} has shape {before}, here {now}"
    for name in common:
        if (name in saved.updates) != (name in live.updates):
            was, here = ("frozen", "trained")[:: 1 if name in live.updates else -1]
            yield f"{name} was {was}, here it is {here}"
    # Kinds of optimizer state of what both have trained; with its names, unless all differ so.
    kept, keeps = saved.moments(), live.moments()
    both = sorted(kept.keys() & keeps.keys())
    kinds = {name: (sorted(kept[name]), sorted(keeps[name])) for name in both}
    for old, new in {str(pair): pair for pair in kinds.values()}.values():
        names = [name for name in both if kinds[name] == (old, new)]
        of = "" if names == both else f" for {_list(names)}"
        if old != new:
            yield f"the optimizer kept {_list(old)}{of}, this one keeps {_list(new)}"


def _list(items: Sequence[str]) -> str:
    more = len(items) - LISTED
    return ", ".join(items[:LISTED]) + (f" and {more} more" if more > 0 else "")

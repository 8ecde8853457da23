"""Bring an engine to the state of the newest checkpoint that verifies, on all ranks together."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.checkpoint import rng_state
from pipeline.checkpoint.layout import dtype, random_key
from pipeline.checkpoint.location import HINT
from pipeline.checkpoint.manifest import Damaged, Manifest
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.checkpoint.store import Store
from pipeline.contracts.engine import (
    WEIGHT,
    Engine,
    EngineState,
    Fragment,
    LossScale,
    ParameterGroup,
)
from pipeline.contracts.precision import dtype_name
from pipeline.contracts.stage import Context
from pipeline.contracts.training import Progress
from pipeline.errors import CheckpointError, ResumeRefused, in_words

NONE_LEFT = "they were renamed, not deleted; to train from the start, start a new run"
LISTED = 5
"""Names that a message lists at most."""


class _Choice(NamedTuple):
    """Which checkpoint to load (empty: none), what was damaged, why none may be."""

    name: str
    damage: str
    refusal: str


class _Problem(NamedTuple):
    """What a rank could not read: in words, and the tensor's key if it is known."""

    rank: int
    text: str
    key: str


class Restoration:
    """One attempt to continue from what a store holds."""

    def __init__(
        self, ctx: Context, engine: Engine, store: Store, frozen_base: Set[str] = frozenset()
    ) -> None:
        self._ctx = ctx
        self._engine = engine
        self._store = store
        self._borrowed = frozen_base
        self.bytes_read = 0
        """By this rank, of tensors."""

    def named(self, name: str, validate: Callable[[Progress], None]) -> Progress:
        """Load this checkpoint. Raises CheckpointError, and leaves it as it is, if that fails."""
        progress = self._load(name, validate)
        self._ctx.dist.barrier()
        self._engine.sync_compute_weights()
        self._ctx.log.info("started from %s", self._store.locate(name))
        return progress

    def newest(self, validate: Callable[[Progress], None]) -> Progress | None:
        """The progress of the newest that could be loaded; None when there is none at all.

        `validate` may refuse a progress before anything is loaded. A damaged checkpoint is put
        aside and the one before it taken, by all ranks. Raises CheckpointError when all that were
        there are damaged, or when one is of another model.
        """
        damage = ""
        while True:
            choice = self._agreed_choice()
            damage = choice.damage or damage
            if not choice.name:
                break
            progress, problem = None, None
            try:
                progress = self._load(choice.name, validate)
            except Damaged as error:
                problem = _Problem(self._ctx.dist.rank, str(error), error.key)
            problems = [_Problem(*found) for found in self._ctx.dist.gather(problem) if found]
            if not problems:
                self._engine.sync_compute_weights()
                self._ctx.log.info("restored %s", self._store.locate(choice.name))
                return progress
            damage = problems[0].text
            self._require_confirmed(choice.name, problems)
            if self._ctx.dist.is_main:
                self._put_aside(choice.name, damage)
        if damage:
            raise CheckpointError(f"no checkpoint can be used: {damage}", hint=NONE_LEFT)
        return None

    def _require_confirmed(self, name: str, problems: Sequence[_Problem]) -> None:
        """Nothing is put aside for what rank 0 reads well: then a machine is bad, not the file."""
        confirmed = None
        if self._ctx.dist.is_main:
            confirmed = json.dumps(self._is_damaged(name, {found.key for found in problems}))
        if not json.loads(self._ctx.dist.broadcast_str(confirmed)):
            raise CheckpointError(
                f"rank {problems[0].rank} cannot read what rank 0 reads well: {problems[0].text}",
                hint="look at that rank's machine and its way to the disk; "
                "the checkpoint was left as it is",
            )

    def _is_damaged(self, name: str, keys: Set[str]) -> bool:
        try:
            reader = CheckpointReader(self._store, name)
            with contextlib.closing(reader):
                reader.require_headers()
                for key in keys - {""}:
                    for _ in reader.read(key, 0, reader.tensors[key].numel):
                        pass
        except Damaged:
            return True
        return False

    def _agreed_choice(self) -> _Choice:
        """Rank 0's choice, on every rank."""
        own = json.dumps(self._choose()) if self._ctx.dist.is_main else None
        choice = _Choice(*json.loads(self._ctx.dist.broadcast_str(own)))
        if choice.refusal:
            raise CheckpointError(choice.refusal)
        return choice

    def _choose(self) -> _Choice:
        """The newest checkpoint whose manifest and files are whole."""
        damage = ""
        try:
            for name in reversed(self._store.names()):
                try:
                    CheckpointReader(self._store, name).require_files()
                except Damaged as error:
                    damage = str(error)
                    self._put_aside(name, damage)
                else:
                    return _Choice(name, damage, "")
            # Damage that an earlier resume has told of is no reason to start from scratch either.
            earlier = [f"{place}: damaged" for place in self._store.aside()]
            return _Choice("", damage or "".join(earlier[-1:]), "")
        except (CheckpointError, OSError) as error:
            return _Choice("", damage, in_words(error))

    def _put_aside(self, name: str, why: str) -> None:
        aside = self._store.quarantine(name)
        self._ctx.log.warning("%s; not used, kept as %s", why, aside)

    def _open(self, name: str) -> CheckpointReader:
        """Rank 0 can read the manifest, so a rank that cannot is looking elsewhere."""
        try:
            return CheckpointReader(self._store, name)
        except CheckpointError as error:
            if self._ctx.dist.is_main:
                raise
            raise CheckpointError(
                f"rank {self._ctx.dist.rank} does not see what rank 0 sees: {error}", hint=HINT
            ) from error

    def _load(self, name: str, validate: Callable[[Progress], None]) -> Progress:
        reader = self._open(name)
        try:
            progress = saved_progress(reader)
            validate(progress)
            live = own_state(self._engine, self._borrowed)
            require_same_model(reader.manifest, live, reader.where)
            for part in self._engine.restore(engine_state(reader.manifest)):
                if part.name in self._borrowed:
                    continue
                for kind, tensor in part.state.items():
                    self._fill(reader, part, kind, tensor)
            self._restore_random(reader, progress)
            self.bytes_read += reader.bytes_read
        finally:
            reader.close()
        return progress

    def _fill(self, reader: CheckpointReader, part: Fragment, kind: str, live: Tensor) -> None:
        key = f"{kind}/{part.name}"
        shape = reader.entry(key).shape
        if tuple(shape) != tuple(part.shape):
            raise CheckpointError(
                f"{reader.where}: {key} has shape {list(shape)}, here {list(part.shape)}"
            )
        stored = dtype(reader.tensors[key].dtype)
        trained = part.name in reader.manifest.state.updates
        if trained and torch.promote_types(stored, live.dtype) != live.dtype:
            self._require_accepted(reader, key, stored, live.dtype)
        for first, data in reader.read(key, part.start, part.start + live.numel()):
            value = torch.frombuffer(data, dtype=stored)
            target = live[first - part.start : first - part.start + value.numel()]
            # What is not trained and was stored rounded is here already, unrounded.
            if trained or not torch.equal(target.to("cpu", stored), value):
                target.copy_(value)

    def _require_accepted(
        self, reader: CheckpointReader, key: str, stored: torch.dtype, live: torch.dtype
    ) -> None:
        if "precision" not in self._ctx.accept:
            raise ResumeRefused(
                f"{reader.where}: {key} is {dtype_name(stored)}, this recipe trains "
                f"{dtype_name(live)}: loading it loses precision",
                hint="keep master weights as they were, or pipe resume --accept precision",
            )

    def _restore_random(self, reader: CheckpointReader, progress: Progress) -> None:
        """New streams where the saved ones have another number of owners, or were not saved."""
        dist = self._ctx.dist
        rng_state.derive(self._ctx.seed, progress.step, dist.rank, dist.world_size)
        if reader.manifest.world_size == dist.world_size:
            keys = {name: random_key(dist.rank, name) for name in rng_state.NAMES}
            states = {n: reader.read_bytes(key) for n, key in keys.items() if key in reader.tensors}
            rng_state.apply(states, dist.device)


def saved_progress(reader: CheckpointReader) -> Progress:
    """How far the training had come."""
    try:
        return Progress.from_record(reader.manifest.progress)
    except TypeError as error:
        raise CheckpointError(f"{reader.where}: written by another version: {error}") from error


def engine_state(manifest: Manifest) -> EngineState:
    """What a manifest says of the engine."""
    state = manifest.state
    shapes = {
        entry.key.partition("/")[2]: tuple(entry.shape)
        for entry in manifest.tensors
        if entry.key.startswith(f"{WEIGHT}/")
    }
    scale = state.loss_scale
    return EngineState(
        shapes=shapes,
        aliases=state.aliases,
        frozen=state.frozen,
        groups=[ParameterGroup(settings=g.settings, parameters=g.parameters) for g in state.groups],
        updates=state.updates,
        moments=state.moments,
        loss_scale=None
        if scale is None
        else LossScale(scale=scale.scale, good_steps=scale.good_steps),
        averages=state.averages,
    )


def require_same_model(manifest: Manifest, live: EngineState, where: str) -> None:
    """Raises ResumeRefused that lists what differs: tensors, shapes, what is trained, by which kind
    of optimizer."""
    saved = engine_state(manifest)
    if live.updates and not saved.updates:
        raise ResumeRefused(
            f"{where} holds weights without an optimizer's state", hint="load them as a model"
        )
    differences = [
        *(
            f"{name} is missing"
            for name, shape in live.shapes.items()
            if name not in saved.shapes and 0 not in shape
        ),
        *(f"{name} is not in this model" for name in saved.shapes if name not in live.shapes),
        *(
            f"{name} has shape {list(saved.shapes[name])}, here {list(shape)}"
            for name, shape in live.shapes.items()
            if name in saved.shapes and tuple(saved.shapes[name]) != tuple(shape)
        ),
        *(
            f"{name} was {_trained(name in saved.updates)}, "
            f"here it is {_trained(name in live.updates)}"
            for name in live.shapes
            if name in saved.shapes and (name in saved.updates) != (name in live.updates)
        ),
    ]
    if set(saved.moments) != set(live.moments):
        differences.append(
            f"the optimizer kept {_list(saved.moments)}, this one keeps {_list(live.moments)}"
        )
    if differences:
        raise ResumeRefused(f"{where} is of another model or optimizer: {_list(differences)}")


def _trained(yes: bool) -> str:
    return "trained" if yes else "frozen"


def _list(items: Sequence[str]) -> str:
    more = len(items) - LISTED
    return ", ".join(items[:LISTED]) + (f" and {more} more" if more > 0 else "")


def own_state(engine: Engine, frozen_base: Set[str]) -> EngineState:
    """The engine's state without the parameters that are `frozen_base` from the model's source."""
    state = engine.state()
    return dataclasses.replace(
        state,
        shapes={name: shape for name, shape in state.shapes.items() if name not in frozen_base},
        aliases={name: kept for name, kept in state.aliases.items() if kept not in frozen_base},
        frozen=[name for name in state.frozen if name not in frozen_base],
    )

"""Bring an engine to the state of the newest checkpoint that verifies, on all ranks together."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeline.checkpoint.division import Tile
from pipeline.checkpoint.location import Store
from pipeline.checkpoint.manifest import MANIFEST, Damaged
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.checkpoint.write_plan import (
    DTYPES,
    GENERATORS,
    RANDOM,
    apply_random,
    random_key,
    start_random_streams,
    without_frozen_base,
)
from pipeline.contracts.engine import WEIGHT, Engine, EngineState, Fragment
from pipeline.contracts.optimizer import dtype_name
from pipeline.contracts.stage import Context
from pipeline.contracts.training import Progress
from pipeline.errors import CheckpointError, ResumeRefused, system_errors_as
from pipeline.utils.activities import activity

LISTED = 5
"""Names that a message lists at most."""


@dataclass
class Restoration:
    """One try to continue from the content of a store."""

    ctx: Context
    engine: Engine
    store: Store
    frozen_base: Set[str] = frozenset()
    bytes_read: int = field(default=0, init=False)
    """Bytes of tensors that this rank read."""

    def newest(self, validate: Callable[[Progress], None]) -> Progress | None:
        """Load the newest checkpoint that verifies; None if none exists. `validate` may refuse a
        progress before anything is loaded. A damaged checkpoint goes into quarantine, and all ranks
        take the one before it. Raises CheckpointError if all are damaged, if one is of another
        model, or if rank 0 reads well what another rank cannot, and StageError on ranks that see
        different ones.

        Values are loaded into the live state before all ranks agree; only `sync_compute_weights`
        waits. That is safe: an earlier checkpoint overwrites all of it, or the run ends."""
        dist, damage = self.ctx.dist, ""
        while True:
            name = found = ""
            if dist.is_main:
                with system_errors_as(CheckpointError):
                    for name in reversed(self.store.names()):
                        try:
                            CheckpointReader(self.store, name).require_files()
                            break
                        except Damaged as error:
                            found = str(error)
                            self._quarantine(name, found)
                    else:
                        # What an earlier resume has found is no reason to start from scratch.
                        earlier = [f"{place}: damaged" for place in self.store.quarantined()]
                        name, found = "", found or "".join(earlier[-1:])
            own = json.dumps((name, found)) if dist.is_main else None
            name, found = json.loads(dist.broadcast_str(own))
            damage = found or damage
            if not name:
                break
            progress, problem = None, None
            try:
                with activity(f"reading {name}"):
                    progress = self.load(name, validate)
            except Damaged as error:
                problem = str(error), error.key
            problems = dist.gather(problem)
            if not any(problems):
                self.engine.sync_compute_weights()
                self.ctx.log.info("restored %s", self.store.locate(name))
                return progress
            damage = self._require_confirmed(name, problems)
            if dist.is_main:
                self._quarantine(name, damage)
        if damage:
            raise CheckpointError(
                f"no checkpoint can be used: {damage}",
                hint="they were renamed, not deleted; to train from the start, start a new run",
            )
        return None

    def _require_confirmed(self, name: str, problems: Sequence[Sequence[str] | None]) -> str:
        """The first of the ranks' problems (its text, and the tensor's key if it is known). Raises
        CheckpointError on every rank unless rank 0 cannot read the tensors either: else the fault
        is that rank's machine, not the file."""
        rank, text = next((rank, found[0]) for rank, found in enumerate(problems) if found)
        confirmed = None
        if self.ctx.dist.is_main:
            confirmed = "no"
            try:
                reader = CheckpointReader(self.store, name)
                reader.require_headers()
                for key in {found[1] for found in problems if found} - {""}:
                    collections.deque(reader.read(key, 0, reader.tensors[key].numel), maxlen=0)
            except Damaged:
                confirmed = "yes"
        if self.ctx.dist.broadcast_str(confirmed) == "no":
            raise CheckpointError(
                f"rank {rank} cannot read what rank 0 reads well: {text}",
                hint="look at that rank's machine and its way to the disk; "
                "the checkpoint was not changed",
            )
        return text

    def _quarantine(self, name: str, why: str) -> None:
        self.ctx.log.warning("%s; not used, kept as %s", why, self.store.quarantine(name))

    def load(self, name: str, validate: Callable[[Progress], None]) -> Progress:
        """Fill the engine, whose state is undefined where that fails, and return the progress
        (collective). Raises Damaged, CheckpointError, and StageError on every rank unless all see
        the same manifest, which holds the sums of all that is read: nodes with separate disks may
        hold different ones."""
        ctx, dist, manifest = self.ctx, self.ctx.dist, b""
        with system_errors_as(CheckpointError), contextlib.suppress(FileNotFoundError):
            manifest = self.store.get(name, MANIFEST)
        facts = {"manifest": hashlib.sha256(manifest).hexdigest()}
        dist.require_same(f"checkpoint {self.store.locate(name)}", facts)
        reader = CheckpointReader(self.store, name)
        progress = Progress.from_record(reader.progress, reader.where)
        validate(progress)
        live = without_frozen_base(self.engine, self.frozen_base)
        kinds = [(*key.partition("/"), entry.shape) for key, entry in reader.tensors.items()]
        shapes = {name: shape for kind, _, name, shape in kinds if kind == WEIGHT}
        saved = dataclasses.replace(reader.state, shapes=shapes)
        require_same_model(saved, live, reader.where, self.frozen_base)
        for fragment in self.engine.restore(saved):
            dist.heartbeat.beat()
            for kind, tensor in fragment.state.items():
                if fragment.name not in self.frozen_base:
                    self._fill(reader, fragment, kind, tensor)
        # The streams of random numbers continue; new ones start where another number of them is
        # needed, or some are missing.
        stream, streams = self.engine.random_stream, self.engine.random_streams
        start = f"{ctx.seed}/{progress.step}/{stream}/{streams}".encode()
        start_random_streams(int.from_bytes(hashlib.sha256(start).digest()[:8], "little"))
        held = {int(name.partition("/")[0]) for kind, _, name, _ in kinds if kind == RANDOM}
        if held == {*range(streams)}:
            keys = {name: random_key(stream, name) for name in GENERATORS}
            states = {n: reader.read_bytes(key) for n, key in keys.items() if key in reader.tensors}
            apply_random(states, dist.device)
        self.bytes_read += reader.bytes_read
        return progress

    def _fill(self, reader: CheckpointReader, fragment: Fragment, kind: str, live: Tensor) -> None:
        key = f"{kind}/{fragment.name}"
        stored = DTYPES[reader.tensors[key].dtype]
        trained = fragment.name in reader.state.updates
        narrows = trained and torch.promote_types(stored, live.dtype) != live.dtype
        if narrows and "precision" not in self.ctx.accept:
            raise ResumeRefused(
                f"{reader.where}: {key} is {dtype_name(stored)}, this recipe trains "
                f"{dtype_name(live.dtype)}: loading it loses precision",
                hint="keep master weights as they were, or pipe resume --accept precision",
            )
        tile = Tile(fragment.start, fragment.stop, fragment.stride, fragment.count)
        for strip in reader.read_tile(key, tile):
            shape, first = (strip.rows, strip.run), live.storage_offset() + strip.target
            value = torch.frombuffer(strip.data, dtype=stored)
            value = value.as_strided(shape, (strip.source_pitch, 1), strip.source)
            target = live.as_strided(shape, (strip.target_pitch, 1), first)
            # An untrained tensor that was stored rounded is here already, unrounded.
            if trained or not torch.equal(target.to("cpu", stored), value):
                target.copy_(value)


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
        hint = "frozen weights are not in checkpoints: to freeze others, start a new run from "
        raise ResumeRefused(
            f"{where} is of another model or optimizer: {_list(differences)}",
            hint=hint + "this run's export" if frozen else "",
        )


def _differences(saved: EngineState, live: EngineState, frozen_base: Set[str]) -> Iterator[str]:
    """Differences as texts; tensors without elements may be missing."""
    missing = [name for name, shape in live.shapes.items() if 0 not in shape]
    yield from (f"{name} is missing" for name in missing if name not in saved.shapes)
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
    for old, new in {str(pair): pair for pair in kinds.values() if pair[0] != pair[1]}.values():
        names = [name for name in both if kinds[name] == (old, new)]
        of = "" if names == both else f" for {_list(names)}"
        yield f"the optimizer kept {_list(old)}{of}, this one keeps {_list(new)}"


def _list(items: Sequence[str]) -> str:
    more = len(items) - LISTED
    return ", ".join(items[:LISTED]) + (f" and {more} more" if more > 0 else "")

"""The training state of a DeepSpeed engine, read and written parameter by parameter."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pipeline import (
    WEIGHT,
    CheckpointError,
    EngineState,
    Fragment,
    LossScale,
    OptimizerPart,
    StageError,
)
from pipeline.checkpoint import Tile
from stages.wrap.load_weights import LocalShard, stored_tensors
from stages.wrap.optimizer_state import (
    fixed_state,
    group_state,
    read_moments,
    require_known,
    set_updates,
    updates,
    write_moments,
)
from stages.wrap.shards import part_of, tiles_of
from stages.wrap.tensor.placements import whole_of
from stages.wrap.zero import compat
from stages.wrap.zero.partitions import (
    FlatMaster,
    flat_masters,
    own_part,
    own_range,
    update_compute_weights,
)


class ZeroState:
    """Views of the live state; owns none of it."""

    def __init__(
        self, live: Any, part: OptimizerPart, base_rates: Sequence[float], growth_interval: int
    ) -> None:
        self._live = live
        self._part = part
        self._base_rates = base_rates
        self._growth_interval = growth_interval
        self._names = {parameter: name for name, parameter in live.module.named_parameters()}
        self._restored: Mapping[str, int] = {}
        """Updates of each parameter when the state was restored."""
        self.applied = 0
        """Updates since then, for optimizers that keep no count."""

    def read(self) -> EngineState:
        """See `Engine.state`."""
        counts: dict[str, int] = {}
        for flat in self._flats:
            kept = self._optimizer_state(flat)
            for name in self._members[flat.number]:
                counts[name] = updates(kept, self._restored.get(name, 0) + self.applied)
        return dataclasses.replace(self._fixed, updates=counts, loss_scale=self._loss_scale())

    @functools.cached_property
    def _flats(self) -> list[FlatMaster]:
        return list(flat_masters(self._live.optimizer))

    @functools.cached_property
    def _members(self) -> dict[int, list[str]]:
        """Number of a flat master -> names of its parameters, also where this rank has no part."""
        return {flat.number: [self._names[p] for p in flat.parameters] for flat in self._flats}

    @functools.cached_property
    def _fixed(self) -> EngineState:
        """The part of the state that never changes."""
        names: dict[int, list[str]] = {}
        for flat in self._flats:
            names.setdefault(flat.group, []).extend(self._members[flat.number])
        given = self._live.optimizer.optimizer.param_groups
        groups = [
            group_state(self._part, {**given[at], "lr": self._base_rates[at]}, names[at])
            for at in sorted(names)
        ]
        return fixed_state(self._live.module, groups, compat.full_shape)

    def fragments(self) -> Iterator[Fragment]:
        """See `Engine.fragments`."""
        yield from self._trained(write=False)
        yield from frozen_fragments(self._live.module, self._live.optimizer)

    def restore(self, state: EngineState) -> Iterator[Fragment]:
        """See `Engine.restore`."""
        self._restored, self.applied = state.updates, 0
        for flat in self._flats:
            counts = {name: state.updates[name] for name in self._members[flat.number]}
            if len(set(counts.values())) > 1:
                message = "parameters that ZeRO updates together were updated unequally often"
                raise CheckpointError(f"{message}: {counts}")
        yield from self._trained(write=True, counts=state.updates)
        yield from frozen_fragments(self._live.module, self._live.optimizer)
        compat.restore_bias_correction(self._live)
        scaler, saved = compat.loss_scaler(self._live), state.loss_scale
        if scaler is not None and saved is not None:
            compat.set_loss_scale(scaler, saved.scale, saved.good_steps % self._growth_interval)

    def sync_compute_weights(self) -> None:
        """See `Engine.sync_compute_weights`."""
        update_compute_weights(self._live.optimizer)

    def master_shards(self) -> Iterator[LocalShard]:
        """This rank's part of every parameter and stored buffer, to be overwritten, each before the
        next is taken; trained parameters are masters. Then call `sync_compute_weights`."""
        for flat in self._flats:
            with flat.present(write=True):
                for part in flat.parts:
                    name = self._names[part.parameter]
                    own = own_part(flat.tensor, part)
                    for tile, begin, end in _tiles(part.parameter, part.start, part.length):
                        values = own[begin:end]
                        yield LocalShard(name, tile.start, values, tile.stride, tile.count)
        yield from frozen_shards(self._live.module, self._live.optimizer)

    def _trained(
        self, *, write: bool, counts: Mapping[str, int] | None = None
    ) -> Iterator[Fragment]:
        for flat in self._flats:
            with flat.present(write=write):
                state = self._optimizer_state(flat)
                if counts is not None:
                    count = counts[self._members[flat.number][0]]
                    set_updates(state, count)
                yield from self._flat_fragments(flat, state, write=write)

    def _flat_fragments(
        self, flat: FlatMaster, state: Mapping[str, Any], *, write: bool
    ) -> Iterator[Fragment]:
        master, rule = flat.tensor, self._part
        # Written as a whole, as blocks of packed values straddle parameters; read in parts, as
        # there may be no memory for a whole unpacked moment during training.
        moments = read_moments(state, rule, 0, master.numel()) if write else {}
        for part in flat.parts:
            own = {name: own_part(values, part) for name, values in moments.items()}
            own = own or read_moments(state, rule, part.low, part.low + part.length)
            live = {WEIGHT: own_part(master, part), **own}
            name = self._names[part.parameter]
            yield from _fragments(name, part.parameter, part.start, live)
        write_moments(state, rule, moments)

    def _optimizer_state(self, flat: FlatMaster) -> dict[str, Any]:
        """Optimizer state of a flat master, created as the optimizer's first step would."""
        optimizer, master = flat.zero.optimizer, flat.tensor
        if not optimizer.state[master]:
            compat.start_optimizer_state(optimizer, master, flat.numel, self._part)
        state: dict[str, Any] = optimizer.state[master]
        require_known(state, self._part, type(optimizer).__name__, master)
        return state

    def _loss_scale(self) -> LossScale | None:
        scaler = compat.loss_scaler(self._live)
        if scaler is None:
            return None
        good = compat.steps_since_overflow(scaler) % self._growth_interval
        return LossScale(scale=float(scaler.cur_scale), good_steps=good)


def frozen_fragments(module: nn.Module, zero: Any) -> Iterator[Fragment]:
    """Frozen parameters and buffers: whole on every rank, or sharded as stage 3 does."""
    for name, tensor in stored_tensors(module):
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            continue
        shard = getattr(tensor, "ds_tensor", None)
        if shard is None:
            view, start = tensor.detach().view(-1), 0
        elif compat.is_swapped(shard):
            raise StageError(
                f"{name} is frozen and on disk, which checkpoints cannot read",
                hint="offload parameters to cpu instead of nvme",
            )
        else:
            start, length = own_range(zero, tensor, shard.numel())
            view = shard.detach().view(-1)[:length]
        yield from _fragments(name, tensor, start, {WEIGHT: view})


def frozen_shards(module: nn.Module, zero: Any) -> Iterator[LocalShard]:
    """The same, to be overwritten."""
    for one in frozen_fragments(module, zero):
        yield LocalShard(one.name, one.start, one.state[WEIGHT], one.stride, one.count)


def _fragments(
    name: str, tensor: Tensor, start: int, state: Mapping[str, Tensor]
) -> Iterator[Fragment]:
    """This rank's elements of a parameter or buffer, from `start` on in what it has of it before
    ZeRO cuts that."""
    shape = compat.full_shape(tensor)
    for tile, begin, end in _tiles(tensor, start, state[WEIGHT].numel()):
        yield Fragment(
            name=name,
            shape=shape,
            start=tile.start,
            state={kind: values[begin:end] for kind, values in state.items()},
            stride=tile.stride,
            count=tile.count,
        )


def _tiles(tensor: Tensor, start: int, length: int) -> Iterator[tuple[Tile, int, int]]:
    """Spans of those elements in the full tensor, and where each begins and ends among them."""
    whole = whole_of(tensor)
    own = [Tile(0, start + length)] if whole is None else tiles_of("", whole)
    end = 0
    for tile in part_of(own, start, start + length):
        begin, end = end, end + tile.numel
        yield tile, begin, end

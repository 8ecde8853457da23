"""Places in which DeepSpeed 0.19 keeps this rank's part of each tensor: of masters with their
optimizer state, and of what is not trained.

Masters are flat tensors, one per group (stages 1 and 2) or per sub-group (stage 3).
`tests/stages/wrap/zero/test_compat.py` guards the private names.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor, nn

from pipeline import WEIGHT, Fragment, StageError
from pipeline.checkpoint import Tile
from stages.wrap.shards import part_of, stored_tensors, tile_fragments, tiles_of
from stages.wrap.zero import compat


class MasterPart(NamedTuple):
    """Elements [low, low + length) of a flat master are [start, start + length) of the flattened
    parameter."""

    name: str
    parameter: nn.Parameter
    low: int
    length: int
    start: int

    def of(self, flat: Tensor) -> Tensor:
        """The part in a flat master or moment, as a live view."""
        return flat.detach().view(-1)[self.low : self.low + self.length]

    def fragments(self, state: Mapping[str, Tensor]) -> Iterator[Fragment]:
        """The elements in `state` by their places in the full parameter."""
        return _fragments(self.name, self.parameter, self.start, state)


@dataclass(frozen=True, eq=False)
class FlatMaster:
    """This rank's flat master of a group or sub-group, which may be swapped to disk at stage 3."""

    zero: Any
    number: int
    group: int
    """Number of the optimizer group that has its hyperparameters."""
    numel: int
    """Its length, also while it is on disk."""
    names: Sequence[str]
    """All of its parameters, including those that this rank has no part of."""
    parts: Sequence[MasterPart]

    @property
    def tensor(self) -> Tensor:
        """The flat tensor itself, which is the key of its optimizer state."""
        return compat.master_partitions(self.zero)[self.number]

    @contextlib.contextmanager
    def present(self, *, write: bool) -> Iterator[None]:
        """Hold the flat tensor and its optimizer state in memory; `write` keeps what the body
        changed, and at stage 3 updates this rank's part of the compute weights."""
        zero, number = self.zero, self.number
        if compat.zero_stage(zero) < 3:
            yield
            return
        swapped = zero._swappable_optimizer_subgroup(number)
        if swapped:
            zero._optimizer_states_and_gradient_swap_in(number)
        fresh = not zero.optimizer.state.get(self.tensor)
        try:
            yield
        except BaseException:  # also when the reader stops: there are few buffers
            if swapped:
                zero._release_swap_buffers(number)
            raise
        if write:
            zero._reassign_or_swap_out_partitioned_parameters(number)
        if swapped and (write or fresh):
            zero._optimizer_states_and_gradient_swap_out(number)
        elif swapped:
            zero._release_swap_buffers(number)


def flat_masters(zero: Any, module: nn.Module) -> Iterator[FlatMaster]:
    """All flat masters of a live ZeRO optimizer, in a fixed order."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    return _sub_groups(zero, names) if compat.zero_stage(zero) == 3 else _groups(zero, names)


def _groups(zero: Any, names: Mapping[Any, str]) -> Iterator[FlatMaster]:
    """A group is one vector of all its parameters, cut into a part per rank."""
    groups = getattr(zero, "round_robin_bit16_groups", None) or zero.bf16_groups
    padding = getattr(zero, "round_robin_bit16_padding", None)
    rank = torch.distributed.get_rank(zero.dp_process_group)
    for index, flat in enumerate(compat.master_partitions(zero)):
        pads = padding[index] if padding else itertools.repeat(0)
        parts, begin, first = [], 0, rank * flat.numel()
        for parameter, pad in zip(groups[index], pads, strict=False):
            low = max(begin, first)
            length = min(begin + parameter.numel(), first + flat.numel()) - low
            if length > 0:
                own = names[parameter], parameter, low - first, length, low - begin
                parts.append(MasterPart(*own))
            begin += parameter.numel() + pad
        every = [names[parameter] for parameter in groups[index]]
        yield FlatMaster(zero, index, index, flat.numel(), every, parts)


def _sub_groups(zero: Any, names: Mapping[Any, str]) -> Iterator[FlatMaster]:
    """Each parameter is cut into a part per rank, the last padded; a rank's parts of a sub-group's
    parameters make one vector."""
    flat_numel = zero.fp16_partitioned_groups_flat_numel
    for index, parameters in enumerate(zero.fp16_groups):
        parts = []
        for parameter in parameters:
            _, low, padded = zero.grad_position[zero.get_param_id(parameter)]
            start, length = _own_range(zero, parameter, padded)
            if length:
                parts.append(MasterPart(names[parameter], parameter, low, length, start))
        every = [names[parameter] for parameter in parameters]
        group, numel = zero.sub_group_to_group_id[index], flat_numel[index]
        yield FlatMaster(zero, index, group, int(numel), every, parts)


def _own_range(zero: Any, parameter: Any, padded: int) -> tuple[int, int]:
    """Stage 3: start of this rank's part within the flattened parameter, and how many of its
    `padded` elements are real."""
    own = getattr(zero, "_get_param_partition_rank", None)  # not of an engine without optimizer
    rank = own(parameter) if own else torch.distributed.get_rank(parameter.ds_process_group)
    start = rank * padded
    return start, min(max(parameter.ds_numel - start, 0), padded)


def update_compute_weights(zero: Any) -> None:
    """Make compute weights follow the masters on all ranks (collective)."""
    if compat.zero_stage(zero) < 3:
        zero.update_lp_params()
        return
    # Whole parameters would not be gathered again, and second copies (hpZ) win over shards.
    zero.checkpoint_event_prologue()
    for parameter in zero.module.parameters():
        parameter.ds_secondary_tensor = None
    zero.checkpoint_event_epilogue()


def frozen_fragments(module: nn.Module, zero: Any) -> Iterator[Fragment]:
    """Frozen parameters and buffers: whole on every rank, or sharded as stage 3 does."""
    for name, tensor in stored_tensors(module):
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            continue
        shard, start = getattr(tensor, "ds_tensor", None), 0
        if shard is None:
            view = tensor.detach().view(-1)
        elif str(getattr(shard, "status", "")).endswith("NOT_AVAILABLE"):
            raise StageError(
                f"{name} is frozen and on disk, which checkpoints cannot read",
                hint="offload parameters to cpu instead of nvme",
            )
        else:
            start, length = _own_range(zero, tensor, shard.numel())
            view = shard.detach().view(-1)[:length]
        yield from _fragments(name, tensor, start, {WEIGHT: view})


def _fragments(
    name: str, tensor: Tensor, start: int, state: Mapping[str, Tensor]
) -> Iterator[Fragment]:
    """The elements in `state` by their places in the full tensor; they are those from `start` on of
    what tensor parallelism leaves to this rank."""
    whole, stop = compat.whole_of(tensor), start + state[WEIGHT].numel()
    own = [Tile(0, stop)] if whole is None else tiles_of(name, whole)
    yield from tile_fragments(name, compat.full_shape(tensor), part_of(own, start, stop), state)

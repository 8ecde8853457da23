"""Places in which DeepSpeed 0.19 keeps this rank's part of each master and its optimizer state.

Masters are flat tensors: one per group (stages 1 and 2) or per sub-group (stage 3), with the
optimizer's state beside them. `tests/stages/wrap/test_deepspeed_contract.py` guards the private
names.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor, nn

from stages.wrap.zero import compat


class MasterPart(NamedTuple):
    """Elements [low, low + length) of a flat master are [start, start + length) of the flattened
    parameter."""

    parameter: nn.Parameter
    low: int
    length: int
    start: int


@dataclass(frozen=True, eq=False)
class FlatMaster:
    """This rank's flat master tensor of a group, at stages 1 and 2."""

    zero: Any
    number: int
    group: int
    """Number of the optimizer group that has its hyperparameters."""
    parameters: Sequence[nn.Parameter]
    """All of its parameters, including those that this rank has no part of."""
    parts: Sequence[MasterPart]

    @property
    def tensor(self) -> Tensor:
        """The flat tensor itself, which is the key of its optimizer state."""
        return compat.master_partitions(self.zero)[self.number]

    @property
    def numel(self) -> int:
        """Length of the flat tensor, also while it is on disk."""
        return self.tensor.numel()

    def present(self, *, write: bool) -> AbstractContextManager[None]:
        """Hold the flat tensor and its optimizer state in memory; `write` keeps what the body
        changed, and updates this rank's part of the compute weights."""
        return contextlib.nullcontext()


class SubGroupMaster(FlatMaster):
    """This rank's flat master tensor of a sub-group at stage 3, which may be swapped to disk."""

    @property
    def numel(self) -> int:
        return int(self.zero.fp16_partitioned_groups_flat_numel[self.number])

    @contextlib.contextmanager
    def present(self, *, write: bool) -> Iterator[None]:
        swapped = self.zero._swappable_optimizer_subgroup(self.number)
        if swapped:
            self.zero._optimizer_states_and_gradient_swap_in(self.number)
        fresh = not self.zero.optimizer.state.get(self.tensor)
        try:
            yield
        except BaseException:  # also when the reader stops: there are few buffers
            if swapped:
                self.zero._release_swap_buffers(self.number)
            raise
        if write:
            self.zero._reassign_or_swap_out_partitioned_parameters(self.number)
        if swapped and (write or fresh):
            self.zero._optimizer_states_and_gradient_swap_out(self.number)
        elif swapped:
            self.zero._release_swap_buffers(self.number)


def own_part(master: Tensor, part: MasterPart) -> Tensor:
    """A part of a flat tensor (master or moment) as a live view."""
    return master.detach().view(-1)[part.low : part.low + part.length]


def flat_masters(zero: Any) -> Iterator[FlatMaster]:
    """All flat masters of a live ZeRO optimizer, in a fixed order."""
    return _sub_groups(zero) if compat.zero_stage(zero) == 3 else _groups(zero)


def _groups(zero: Any) -> Iterator[FlatMaster]:
    """A group is one vector of all its parameters, cut into a part per rank."""
    groups = getattr(zero, "round_robin_bit16_groups", None) or zero.bf16_groups
    padding = getattr(zero, "round_robin_bit16_padding", None)
    rank = torch.distributed.get_rank(zero.dp_process_group)
    for index, flat in enumerate(compat.master_partitions(zero)):
        pads = padding[index] if padding else itertools.repeat(0)
        parts, begin, first = [], 0, rank * flat.numel()
        for parameter, pad in zip(groups[index], pads, strict=False):
            low = max(begin, first)
            high = min(begin + parameter.numel(), first + flat.numel())
            if low < high:
                parts.append(MasterPart(parameter, low - first, high - low, low - begin))
            begin += parameter.numel() + pad
        yield FlatMaster(zero, index, index, groups[index], parts)


def _sub_groups(zero: Any) -> Iterator[FlatMaster]:
    """Each parameter is cut into a part per rank, the last padded; a rank's parts of a sub-group's
    parameters make one vector."""
    for index, parameters in enumerate(zero.fp16_groups):
        parts = []
        for parameter in parameters:
            _, low, padded = zero.grad_position[zero.get_param_id(parameter)]
            start, length = own_range(zero, parameter, padded)
            if length:
                parts.append(MasterPart(parameter, low, length, start))
        yield SubGroupMaster(zero, index, zero.sub_group_to_group_id[index], parameters, parts)


def own_range(zero: Any, parameter: Any, padded: int) -> tuple[int, int]:
    """Stage 3: start of this rank's part within the flattened parameter, and how many of the part's
    `padded` elements are no padding."""
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

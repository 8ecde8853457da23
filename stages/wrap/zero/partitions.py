"""Where DeepSpeed 0.19 keeps this rank's part of each master weight and its optimizer state.

Masters are flat tensors: one per group (stages 1 and 2) or per sub-group (stage 3), with the
optimizer's state beside them. `tests/stages/wrap/test_deepspeed_contract.py` guards the private
names.
"""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
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


class FlatMaster(NamedTuple):
    """One flat master tensor."""

    number: int
    group: int
    """Number of the optimizer group that has its hyperparameters."""
    parameters: Sequence[nn.Parameter]
    """All of its parameters, also those of which this rank has no part."""
    parts: Sequence[MasterPart]


class Partitions(ABC):
    """The flat masters of a ZeRO optimizer."""

    def __init__(self, zero: Any) -> None:
        self.zero = zero

    @abstractmethod
    def flats(self) -> Iterator[FlatMaster]:
        """All flat masters, in a fixed order."""

    @abstractmethod
    def optimizer(self, flat: FlatMaster) -> Any:
        """The torch optimizer that updates this flat master."""

    @abstractmethod
    def master(self, flat: FlatMaster) -> Tensor:
        """The flat tensor itself, which is the key of its optimizer state."""

    @abstractmethod
    def elements(self, flat: FlatMaster) -> int:
        """Length of the flat tensor, also while it is on disk."""

    @abstractmethod
    def present(self, flat: FlatMaster, *, write: bool) -> contextlib.AbstractContextManager[None]:
        """Hold the flat master and its optimizer state in memory; `write` keeps what the body
        changed, and updates this rank's part of the compute weights."""

    def own_range(self, parameter: Any, padded: int) -> tuple[int, int]:
        """Stage 3: start of this rank's part within the flattened parameter, and how many of the
        part's `padded` elements are no padding."""
        start = self.zero._get_param_partition_rank(parameter) * padded
        return start, min(max(parameter.ds_numel - start, 0), padded)

    @abstractmethod
    def gather(self) -> None:
        """Make compute weights follow the masters on all ranks (collective)."""


def own_part(master: Tensor, part: MasterPart) -> Tensor:
    """A part of a flat tensor (master or moment) as a live view."""
    return master.detach().view(-1)[part.low : part.low + part.length]


def partitions(zero: Any) -> Partitions:
    """The flat masters of a live ZeRO optimizer, by the stage that it implements."""
    return _Sharded(zero) if compat.zero_stage(zero) == 3 else _Replicated(zero)


class _Replicated(Partitions):
    """Stages 1 and 2: a group is one vector of all its parameters, cut into a part per rank."""

    def flats(self) -> Iterator[FlatMaster]:
        groups = getattr(self.zero, "round_robin_bit16_groups", None) or self.zero.bf16_groups
        padding = getattr(self.zero, "round_robin_bit16_padding", None)
        rank = torch.distributed.get_rank(self.zero.dp_process_group)
        for index, flat in enumerate(compat.master_partitions(self.zero)):
            pads = padding[index] if padding else itertools.repeat(0)
            parts = _overlaps(groups[index], pads, rank * flat.numel(), flat.numel())
            yield FlatMaster(index, index, groups[index], list(parts))

    def optimizer(self, flat: FlatMaster) -> Any:
        return self.zero.optimizer

    def master(self, flat: FlatMaster) -> Tensor:
        return compat.master_partitions(self.zero)[flat.number]

    def elements(self, flat: FlatMaster) -> int:
        return self.master(flat).numel()

    def present(self, flat: FlatMaster, *, write: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def gather(self) -> None:
        self.zero.update_lp_params()


def _overlaps(
    parameters: Sequence[nn.Parameter], pads: Any, first: int, length: int
) -> Iterator[MasterPart]:
    """Parts of consecutive parameters that lie in [first, first + length)."""
    begin = 0
    for parameter, pad in zip(parameters, pads, strict=False):
        low = max(begin, first)
        high = min(begin + parameter.numel(), first + length)
        if low < high:
            yield MasterPart(parameter, low - first, high - low, low - begin)
        begin += parameter.numel() + pad


class _Sharded(Partitions):
    """Stage 3: each parameter is cut into a part per rank, the last padded; a rank's parts of a
    sub-group's parameters make one vector, which may be swapped to disk."""

    def flats(self) -> Iterator[FlatMaster]:
        for index, parameters in enumerate(self.zero.fp16_groups):
            parts = list(self._parts(parameters))
            yield FlatMaster(index, self.zero.sub_group_to_group_id[index], parameters, parts)

    def _parts(self, parameters: Sequence[Any]) -> Iterator[MasterPart]:
        for parameter in parameters:
            _, low, padded = self.zero.grad_position[self.zero.get_param_id(parameter)]
            start, length = self.own_range(parameter, padded)
            if length:
                yield MasterPart(parameter, low, length, start)

    def optimizer(self, flat: FlatMaster) -> Any:
        devices = getattr(self.zero, "subgroup_to_device", {})
        if devices.get(flat.number, "cpu") == "cpu":
            return self.zero.optimizer
        return self.zero.backup_optimizer

    def master(self, flat: FlatMaster) -> Tensor:
        master: Tensor = self.zero.fp32_partitioned_groups_flat[flat.number]
        return master

    def elements(self, flat: FlatMaster) -> int:
        return int(self.zero.fp16_partitioned_groups_flat_numel[flat.number])

    @contextlib.contextmanager
    def present(self, flat: FlatMaster, *, write: bool) -> Iterator[None]:
        swapped = self.zero._swappable_optimizer_subgroup(flat.number)
        if swapped:
            self.zero._optimizer_states_and_gradient_swap_in(flat.number)
        fresh = not self.optimizer(flat).state.get(self.master(flat))
        try:
            yield
        except BaseException:  # also when the reader stops: there are few buffers
            if swapped:
                self.zero._release_swap_buffers(flat.number)
            raise
        if write:
            self.zero._reassign_or_swap_out_partitioned_parameters(flat.number)
        if swapped and (write or fresh):
            self.zero._optimizer_states_and_gradient_swap_out(flat.number)
        elif swapped:
            self.zero._release_swap_buffers(flat.number)

    def gather(self) -> None:
        # Whole parameters would not be gathered again, and second copies (hpZ) win over shards.
        self.zero.checkpoint_event_prologue()
        for parameter in self.zero.module.parameters():
            parameter.ds_secondary_tensor = None
        self.zero.checkpoint_event_epilogue()

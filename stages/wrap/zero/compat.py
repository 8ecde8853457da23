"""Names of DeepSpeed 0.19 that are private or differ between versions, which only this file and
`operators_compat.py` use; `tests/stages/wrap/zero/test_compat.py` guards them.

Masters are flat tensors, one per group (stages 1 and 2) or per sub-group (stage 3).
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline import WEIGHT, DistContext, Fragment, OptimizerPart, StageError, dtype_name
from pipeline.checkpoint import Tile
from stages.wrap.build import replace_parameters
from stages.wrap.optimizer_state import UPDATES, require_known
from stages.wrap.shards import part_of, stored_tensors, tile_fragments, tiles_of
from stages.wrap.zero.operators_compat import keep_operators


def point_at_device(dist: DistContext) -> None:
    """Set the device that DeepSpeed uses, and keep its operators; call before it is first
    imported."""
    # Read at import; unset, DeepSpeed guesses from what is installed.
    os.environ.setdefault("DS_ACCELERATOR", dist.device.type)
    # zero.Init reads the device index from here, also without a launcher.
    os.environ.setdefault("LOCAL_RANK", str(dist.local_rank))
    keep_operators()


def start(dist: DistContext, log: logging.Logger) -> None:
    """Make DeepSpeed use this run's device, its log, and torch's running process group."""
    point_at_device(dist)
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import logger

    # Its warnings go to the run's log.
    logger.handlers.clear()
    logger.parent, logger.propagate = log, True
    logger.setLevel(logging.WARNING)
    with quiet():
        deepspeed.init_distributed(
            dist_backend=get_accelerator().communication_backend_name(),
            auto_mpi_discovery=False,
            verbose=False,
        )


def whole_of(tensor: Any) -> DTensor | None:
    """The tensor on the meta device that a parameter is a tensor-parallel part of."""
    whole: DTensor | None = getattr(tensor, "part_of", None)
    return whole


def full_shape(tensor: Any) -> tuple[int, ...]:
    """The tensor's full shape, also where tensor parallelism or stage 3 has divided it."""
    whole = whole_of(tensor)
    return tuple(getattr(tensor, "ds_shape", tensor.shape) if whole is None else whole.shape)


def partition_parameters(
    module: nn.Module, device: torch.device, dtype: torch.dtype, config: Mapping[str, Any],
    groups: Any,
) -> None:  # fmt: skip
    """Give each meta parameter uninitialised storage, and partition it as soon as it exists, as
    zero.Init does: no process holds more of the model than its part and one whole tensor. It is
    partitioned among the data-parallel ranks of `groups`, or all. Among all, linear layers keep no
    gathered weight for backward from here on, as in zero.Init's context; a layer that ranks divide
    is not gathered again in time."""
    import deepspeed

    with quiet():
        init = deepspeed.zero.Init(
            data_parallel_group=None if groups is None else groups.get_data_parallel_group(),
            config_dict_or_path=dict(config),
            mpu=groups,
        )
    if groups is None and init.mem_efficient_linear:
        init._enable_mem_efficient_linear()

    def partitioned(_: str, parameter: nn.Parameter) -> nn.Parameter:
        empty = torch.empty_like(parameter, device=device, dtype=dtype)
        made = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        init._convert_to_zero_parameters([made])
        return made

    replace_parameters(module, partitioned)


def zero_stage(optimizer: Any) -> int:
    """The stage that a live ZeRO optimizer implements."""
    stages = {
        "DeepSpeedZeroOptimizer_Stage3": 3,
        "DeepSpeedZeroOptimizer": 2 if getattr(optimizer, "partition_gradients", False) else 1,
        "BF16_Optimizer": 1,  # for bf16 parameters with fp32 accumulation
    }
    return stages.get(type(optimizer).__name__, 0)


def master_partitions(optimizer: Any) -> list[Tensor]:
    """This rank's flat master weights, a tensor per group or sub-group; on disk they are empty."""
    for name in (
        "fp32_partitioned_groups_flat",
        "single_partition_of_fp32_groups",
        "fp32_groups_flat_partition",
    ):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return []


def offload_devices(optimizer: Any) -> tuple[str | None, str | None]:
    """Place of optimizer state and parameter shards: `cpu`, `nvme`, or None for neither."""
    names = ("swap_optimizer", "offload_optimizer", "cpu_offload")
    nvme, *cpu = (getattr(optimizer, name, False) for name in names)
    of_optimizer = "nvme" if nvme else "cpu" if any(cpu) else None
    nvme, on_host = (
        getattr(optimizer, name, False) for name in ("params_in_nvme_and_cpu", "offload_param")
    )
    return of_optimizer, "nvme" if nvme else "cpu" if on_host else None


def facts(live: Any) -> dict[str, Any]:
    """The part of an engine's description that is read under DeepSpeed's names."""
    zero, apart = live.optimizer, int(live.mp_world_size)
    on_optimizer, on_parameters = offload_devices(zero)
    reduce = getattr(zero, "communication_data_type", None) or live.communication_data_type
    return {
        "zero_optimizer": type(zero).__name__,
        "optimizer": type(zero.optimizer).__name__,
        "zero_stage": zero_stage(zero),
        "world_size": torch.distributed.get_world_size(zero.dp_process_group) * apart,
        "tensor_parallel": apart,
        "device": str(live.device).partition(":")[0],
        "master": sorted({dtype_name(one.dtype) for one in master_partitions(zero)}),
        "reduce": dtype_name(reduce),
        "offload_optimizer": on_optimizer,
        "offload_param": on_parameters,
        "max_grad_norm": zero.clip_grad or None,
        "accumulation": "managed" if live.managed_gradient_accumulation() else "unmanaged",
        "loss_scaling": bool(getattr(getattr(zero, "loss_scaler", None), "dynamic", False)),
    }


def running_grad_norm(live: Any) -> float:
    """Norm of the gradients that the running step is about to apply; the engine's own norm is still
    of the step before."""
    return float(live.optimizer._global_grad_norm)


def set_loss_scale(zero: Any, scale: float) -> None:
    """Set the scale of the next backward, if there is one. Left to itself, DeepSpeed grows the
    scale before it unscales the gradients of the same step, which halves them, and ends the run at
    its least scale."""
    scaler: Any = getattr(zero, "loss_scaler", None)
    if getattr(scaler, "dynamic", False):
        scaler.cur_scale, scaler.min_scale = scale, 0.0


def quiet() -> AbstractContextManager[Any]:
    """Drop DeepSpeed's prints in the body."""
    return contextlib.redirect_stdout(io.StringIO())


def restore_bias_correction(optimizer: Any) -> None:
    """Recompute the powers of beta that DeepSpeedCPUAdam keeps outside of its saved state. It
    multiplies beta^t up in float32; after loading it would continue with pow(beta, t), which
    differs in the last bits."""
    kernel = getattr(optimizer, "ds_opt_adam", None)
    steps = [state["step"] for state in optimizer.state.values() if "step" in state]
    if kernel is None or not steps:
        return
    group, nothing = optimizer.param_groups[0], [torch.zeros(1) for _ in range(4)]
    settings = group["lr"], *group["betas"], group["eps"], 0.0, True
    for step in range(1, int(max(steps)) + 1):
        kernel.adam_update(optimizer.opt_id, step, *settings, *nothing)


class FlatPart(NamedTuple):
    """Elements [low, low + length) of a flat tensor are [start, start + length) of the flattened
    parameter, or of this rank's part of it under tensor parallelism."""

    name: str
    parameter: Tensor
    low: int
    length: int
    start: int

    def of(self, flat: Tensor) -> Tensor:
        """The part in a flat master or moment, as a live view."""
        return flat.detach().view(-1)[self.low : self.low + self.length]

    def fragments(self, state: Mapping[str, Tensor]) -> Iterator[Fragment]:
        """The elements in `state` by their places in the full parameter."""
        name, whole, stop = self.name, whole_of(self.parameter), self.start + self.length
        own = [Tile(0, stop)] if whole is None else tiles_of(name, whole)
        tiles = part_of(own, self.start, stop)
        yield from tile_fragments(name, full_shape(self.parameter), tiles, state)


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
    parts: Sequence[FlatPart]

    @property
    def tensor(self) -> Tensor:
        """The flat tensor itself, which is the key of its optimizer state."""
        return master_partitions(self.zero)[self.number]

    def state(self, part: OptimizerPart) -> dict[str, Any]:
        """The optimizer's state of the flat tensor, created as the first step would. Raises
        StageError for what the part does not declare."""
        optimizer, master = self.zero.optimizer, self.tensor
        state: dict[str, Any] = optimizer.state[master]
        if not state:
            wide = getattr(optimizer, "fp32_optimizer_states", False)
            like = master.new_empty(0, dtype=torch.float32 if wide else master.dtype)
            on_device = any(group.get("fused") for group in optimizer.param_groups)
            count = torch.zeros((), device=master.device if on_device else "cpu")
            own_kernel = type(optimizer).__module__.startswith("deepspeed.")
            state |= {UPDATES: 0 if own_kernel else count} if part.counts_updates else {}
            if part.packing is None:
                state |= {name: like.new_zeros(self.numel) for name in part.moments}
            else:
                state |= part.packing.start(master.detach(), self.numel)
        require_known(state, part, type(optimizer).__name__, master)
        return state

    @contextlib.contextmanager
    def present(self, *, write: bool) -> Iterator[None]:
        """Hold the flat tensor and its optimizer state in memory; `write` keeps what the body
        changed, and at stage 3 updates this rank's part of the compute weights."""
        zero, number = self.zero, self.number
        if zero_stage(zero) < 3:
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
    if zero_stage(zero) == 3:
        # Each parameter is cut into a part per rank, the last padded; a rank's parts of a
        # sub-group's parameters make one vector.
        flat_numel = zero.fp16_partitioned_groups_flat_numel
        for index, parameters in enumerate(zero.fp16_groups):
            parts = []
            for parameter in parameters:
                _, low, padded = zero.grad_position[zero.get_param_id(parameter)]
                start, length = _own_range(zero, parameter, padded)
                if length:
                    parts.append(FlatPart(names[parameter], parameter, low, length, start))
            every = [names[parameter] for parameter in parameters]
            group, numel = zero.sub_group_to_group_id[index], flat_numel[index]
            yield FlatMaster(zero, index, group, int(numel), every, parts)
        return
    # A group is one vector of all its parameters, cut into a part per rank.
    groups = getattr(zero, "round_robin_bit16_groups", None) or zero.bf16_groups
    padding = getattr(zero, "round_robin_bit16_padding", None)
    rank = torch.distributed.get_rank(zero.dp_process_group)
    for index, flat in enumerate(master_partitions(zero)):
        pads = padding[index] if padding else itertools.repeat(0)
        parts, begin, first = [], 0, rank * flat.numel()
        for parameter, pad in zip(groups[index], pads, strict=False):
            low = max(begin, first)
            length = min(begin + parameter.numel(), first + flat.numel()) - low
            if length > 0:
                own = names[parameter], parameter, low - first, length, low - begin
                parts.append(FlatPart(*own))
            begin += parameter.numel() + pad
        every = [names[parameter] for parameter in groups[index]]
        yield FlatMaster(zero, index, index, flat.numel(), every, parts)


def _own_range(zero: Any, parameter: Any, padded: int) -> tuple[int, int]:
    """Stage 3: start of this rank's part within the flattened parameter, and how many of its
    `padded` elements are real."""
    own = getattr(zero, "_get_param_partition_rank", None)  # not of an engine without optimizer
    rank = own(parameter) if own else torch.distributed.get_rank(parameter.ds_process_group)
    start = rank * padded
    return start, min(max(parameter.ds_numel - start, 0), padded)


def update_compute_weights(zero: Any) -> None:
    """Make compute weights follow the masters on all ranks (collective)."""
    if zero_stage(zero) < 3:
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
        shard, start, length = getattr(tensor, "ds_tensor", None), 0, tensor.numel()
        if str(getattr(shard, "status", "")).endswith("NOT_AVAILABLE"):
            raise StageError(
                f"{name} is frozen and on disk, which checkpoints cannot read",
                hint="offload parameters to cpu instead of nvme",
            )
        if shard is not None:
            start, length = _own_range(zero, tensor, shard.numel())
        part = FlatPart(name, tensor, 0, length, start)
        yield from part.fragments({WEIGHT: part.of(tensor if shard is None else shard)})

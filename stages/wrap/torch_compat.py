"""Names of torch that are private or differ between its versions: DDP, fully_shard, placements
and optimizers."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from pipeline import StageError, dtype_name
from pipeline.utils import local_part, plural


def no_buffer_sync() -> dict[str, Any]:
    """Arguments that keep DDP from broadcasting buffers at every forward. Every rank builds the
    same ones, and no causal language model updates one in forward."""
    known = inspect.signature(DistributedDataParallel).parameters
    # torch 2.13 renamed the argument and deprecates the old name.
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: False}


def hook_states(model: DistributedDataParallel) -> list[object]:
    """States of the registered communication hooks."""
    return [state for _, state in model._comm_hooks]


def prime_buckets(model: DistributedDataParallel) -> None:
    """Make torch lay out its final buckets now (collective). It lays them out again in the first
    forward after the first backward, in the order in which gradients arrived. On three or more
    ranks the layout decides the order of summation, so a resumed run's first step would differ in
    the last bits from an undisturbed run's. A backward of zeros before any step makes both runs
    alike. Gradients must not be views of the first buckets then, or both layouts are held until the
    first step has ended: one more copy of all gradients."""
    _reduce_zeros(model)
    model.zero_grad(set_to_none=True)
    if model.reducer._rebuild_buckets() and sums_in_buckets(model):
        _reduce_zeros(model)  # gradients become views of the new buckets
        model.zero_grad(set_to_none=False)


def _reduce_zeros(model: DistributedDataParallel) -> None:
    nothing: Any = sum(p.sum() * 0.0 for p in model.parameters() if p.requires_grad)
    # As in DDP's forward: parameters that are unreachable from here count as ready.
    model.reducer.prepare_for_backward([nothing] if model.find_unused_parameters else [])
    nothing.backward()


def sums_in_buckets(model: DistributedDataParallel) -> bool:
    """Whether gradients of several micro-batches can add up in the buckets. They exist anyway;
    elsewhere, micro-batches before the last would allocate as much again. Gradients must be None
    where a parameter may get none. It holds from the first step on, as torch multiplies a gradient
    that it copies into a bucket by 1 / n, and divides one that is there already by n, which differs
    in the last bits."""
    others = model.find_unused_parameters or model.static_graph
    return model.gradient_as_bucket_view and not others


def require_reduced(model: nn.Module) -> None:
    """Raise StageError if a backward left parameters without a gradient: torch has then not
    averaged the others of their buckets, and says so in the next forward, after a wrong update."""
    if not isinstance(model, DistributedDataParallel):
        return
    try:
        model._check_reducer_finalized()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        trained = [name for name, one in model.module.named_parameters() if one.requires_grad]
        names = [trained[int(one)] for one in numbers[1].split()] if numbers else []
        shown = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
        raise StageError(
            f"{plural(len(names), 'parameter')} got no gradient ({shown}), so the gradients of "
            "others were not averaged over the ranks",
            hint="set static_graph: true in the wrap slot if they never get one, or else "
            "find_unused_parameters: true",
        ) from error


def split_of(placement: Placement) -> int | None:
    """Number of chunks into which a dimension is split before each is cut for the ranks: 1, or
    more where a later axis cuts it again, as tensor parallelism under fully_shard. None for a
    placement that does not cut."""
    if isinstance(placement, _StridedShard):
        return int(placement.split_factor)
    return 1 if type(placement) is Shard else None


def packed(dim: int, parts: int) -> Placement:
    """Placement of a matrix that holds `parts` equal matrices one after the other along `dim`; each
    is sharded."""
    return _StridedShard(dim, split_factor=parts)


def multiply(tensors: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply tensors, in place, by a scalar that is the same on every rank, in few kernels."""
    kinds: dict[Any, list[Tensor]] = defaultdict(list)
    for part in map(local_part, tensors):
        kinds[part.device, part.dtype].append(part)
    for (device, _), same in kinds.items():
        torch._foreach_mul_(same, factor.to(device))


def step_divided(optimizer: Any, divisor: Tensor | None, norm: Tensor) -> bool:
    """Update by gradients over `divisor`, in the kernel that updates; change nothing where their
    `norm` is not finite. Both are scalars on the device, as torch's GradScaler hands them over.
    False for all but torch's own fused kernels; nothing is done then."""
    own = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    if not own or not all(group["fused"] for group in optimizer.param_groups):
        return False
    optimizer.grad_scale, optimizer.found_inf = divisor, (~torch.isfinite(norm)).float()
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf
    return True


def sharding_facts(roots: Sequence[nn.Module]) -> dict[str, Any]:
    """Units, dtypes and resharding (of the units below the roots), read from torch's own state
    objects."""
    modules = [one for root in roots for one in root.modules() if isinstance(one, FSDPModule)]
    groups = [group for module in modules for group in _groups(module)]
    below = [group for module in modules if module not in roots for group in _groups(module)]
    again = sorted({group.post_forward_mesh_info is not None for group in below})
    return {
        "units": len(modules),
        "reshard_after_forward": again or [False],
        "compute": sorted({dtype_name(g.mp_policy.param_dtype) for g in groups}),
        "reduce": sorted({dtype_name(g.mp_policy.reduce_dtype) for g in groups}),
        "cpu_offload": all(isinstance(g.offload_policy, CPUOffloadPolicy) for g in groups),
    }


def sum_in_reduce_dtype(model: nn.Module) -> None:
    """Add new gradients to those that wait in the reduce dtype, as FSDP does after a backward that
    its hooks see."""
    for unit in model.modules():
        for group in _groups(unit) if isinstance(unit, FSDPModule) else ():
            for parameter in group.fsdp_params:
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


def _groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # one group a module before torch 2.12
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]

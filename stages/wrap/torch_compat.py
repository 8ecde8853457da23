"""What is private or differs between torch versions about DistributedDataParallel, in one place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.nn.parallel import DistributedDataParallel

from pipeline.contracts.precision import dtype_name

SHARED = -1
"""The key of these hooks on every module; torch counts its own from 0."""


def around_forward(
    module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]
) -> None:
    """Have `before` called ahead of `module`'s forward, and `after` behind it, even where that
    raises.

    torch's own registration numbers hooks, and what it compiles looks up their numbers: each block
    would have a graph of its own, up to a limit from which on blocks are not compiled.
    """
    module._forward_pre_hooks[SHARED] = before
    module._forward_hooks[SHARED] = after
    module._forward_hooks_always_called[SHARED] = True


def no_buffer_sync() -> dict[str, Any]:
    """Arguments that keep buffers from being broadcast at every forward.

    They are the same everywhere from birth, and no causal language model updates one in forward.
    """
    known = inspect.signature(DistributedDataParallel).parameters
    # torch 2.13 renamed the argument and deprecates the old name.
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: False}


def hook_states(model: DistributedDataParallel) -> list[object]:
    """What the registered communication hooks were registered with."""
    return [state for _, state in model._comm_hooks]


def settle_buckets(model: DistributedDataParallel) -> None:
    """Have torch lay out its buckets for good (collective).

    It does so anew after the first backward, in the order in which gradients came. On three or more
    ranks the layout decides the order of summation, so a resumed run's first step would differ in
    the last bits from an undisturbed run's. A backward of nothing at birth settles it in both.
    """
    nothing: Any = sum(p.sum() * 0.0 for p in model.parameters() if p.requires_grad)
    # As its forward does: what it finds no way to from here counts as ready.
    model.reducer.prepare_for_backward([nothing] if model.find_unused_parameters else [])
    nothing.backward()
    model.zero_grad(set_to_none=not keeps_gradients(model))


def keeps_gradients(model: DistributedDataParallel) -> bool:
    """Whether gradients stay as zeros between steps. They are views of buckets, which are there
    anyway; without them, micro-batches before the last would take as much again. Where a parameter
    may be left without one, it must be none.

    From the first step on: torch multiplies by 1 / n what it copies into a bucket, and divides by n
    what is there already, which differs in the last bits.
    """
    return bool(
        model.gradient_as_bucket_view
        and not model.find_unused_parameters
        and not model.static_graph
    )


T = TypeVar("T")

FIRST = 1 << 20
"""Bytes of torch's first bucket."""


def cut(parameters: Sequence[T], size: Callable[[T], int], cap: int) -> Iterator[list[T]]:
    """Trained parameters from the last to the first, in buckets that are full at `cap` bytes."""
    bucket: list[T] = []
    filled, full = 0, FIRST
    for parameter in reversed(parameters):
        bucket.append(parameter)
        filled += size(parameter)
        if filled >= full:
            yield bucket
            bucket, filled, full = [], 0, cap
    if bucket:
        yield bucket


def sharding_facts(model: nn.Module) -> dict[str, Any]:
    """Units, dtypes and resharding as torch's own state objects hold them.

    `reshard_after_forward` is that of the units below the root.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for module in modules for group in _groups(module)]
    below = [group for module in modules if module is not model for group in _groups(module)]
    return {
        "units": len(modules),
        "reshard_after_forward": sorted({g.post_forward_mesh_info is not None for g in below})
        or [False],
        "compute": sorted({dtype_name(g.mp_policy.param_dtype) for g in groups}),
        "reduce": sorted({dtype_name(g.mp_policy.reduce_dtype) for g in groups}),
        "cpu_offload": all(isinstance(g.offload_policy, CPUOffloadPolicy) for g in groups),
    }


def reshard(model: nn.Module) -> None:
    """Give up what is gathered: after a forward pass without backward (evaluation), units may still
    be whole."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def _groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # one group a module before torch 2.12
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]
